"""Tools: calls that obey their schema, whole and streamed, and text that stays text."""

from __future__ import annotations

import json
import random

import pytest

from foretell.models.chat_template import ChatTemplate
from foretell.models.tokenizer import Tokenizer
from foretell.server.tools import Calls
from tests.server import rig

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "description": "T", "parameters": NOTHING}}
USER = [{"role": "user", "content": "hello"}]


def calls(template: str) -> Calls:
    inner = rig.model().tokenizer.inner
    return Calls(Tokenizer(inner, "x", ChatTemplate(template, {})))


TAGGED = calls("tools <tool_call>\n")
LISTED = calls("tools <tool_call>[")
LLAMA = calls("tools parameters ipython")


@pytest.fixture(scope="module")
def server():
    with rig.running() as made:
        yield made
        made.wait_idle()


@pytest.mark.parametrize("many", [False, True])
def test_a_call_that_is_required_is_made_and_obeys(server, many):
    body = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": many,
            "max_tokens": 300, "seed": 2, "logit_bias": {"1": 100}}  # fmt: skip
    whole = server.chat(**body)["choices"][0]
    off = server.chat(**body, speculation={"enabled": False})["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    made = whole["message"]["tool_calls"]
    assert [c["function"] for c in off["message"]["tool_calls"]] == [c["function"] for c in made]
    for call in made:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] in ("weather", "now")
        assert set(arguments) == ({"city"} if call["function"]["name"] == "weather" else set())
    events = server.stream("/v1/chat/completions", messages=USER, **body)
    parts = [event["choices"][0] for event in events]
    streamed = [c for part in parts for c in part["delta"].get("tool_calls", [])]
    assert [c["function"] for c in streamed] == [c["function"] for c in made]
    assert [c["index"] for c in streamed] == list(range(len(made)))
    assert "".join(part["delta"].get("content", "") for part in parts) == ""
    assert parts[-1]["finish_reason"] == "tool_calls"


def test_a_named_function_is_the_one_that_is_called(server):
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = server.chat(tools=[NOW, WEATHER], tool_choice=choice, parallel_tool_calls=False,
                         max_tokens=100)  # fmt: skip
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    # What came back goes on as a conversation.
    after = [*USER, answer["choices"][0]["message"],
             {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]  # fmt: skip
    server.chat(messages=after, tools=[WEATHER], max_tokens=4)


def test_free_text_stays_text(server):
    body = {"max_tokens": 40, "seed": 3}
    told = server.chat(tools=[WEATHER], **body)["choices"][0]
    assert told["finish_reason"] in ("stop", "length")
    assert "tool_calls" not in told["message"]
    events = server.stream("/v1/chat/completions", messages=USER, tools=[WEATHER], **body)
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    assert text == told["message"]["content"]
    untold = server.chat(**body)["usage"]["prompt_tokens"]
    assert server.chat(tools=[WEATHER], **body)["usage"]["prompt_tokens"] > untold
    none = server.chat(tools=[WEATHER], tool_choice="none", **body)
    assert none["usage"]["prompt_tokens"] == untold


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no good"}}]}, "tools"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(server, body, field):
    answer = server.post("/v1/chat/completions", messages=USER, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field), answer.text


def test_models_without_a_way_to_call_say_so():
    for template in ("{{ messages }}", "tools are nice"):
        with pytest.raises(ValueError, match="tool"):
            calls(template)


WRONG = '<tool_call>{"name": 1, "arguments": {}}'
CALL = '{"name": "f", "arguments": {"a": "é"}}'
SAID = [
    (TAGGED, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    (TAGGED, f"well <tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "well ", 2),
    (TAGGED, f"<tool_call>{CALL}", "", 1),  # cut behind the call
    (TAGGED, "a < b <tool", "a < b <tool", 0),
    (TAGGED, "<tool_call>{not json}</tool_call> x", "<tool_call>{not json}</tool_call> x", 0),
    (TAGGED, WRONG, WRONG, 0),
    (LISTED, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", 2),
    (LLAMA, CALL.replace("arguments", "parameters"), "", 1),
    (LLAMA, f"{CALL}; {CALL}".replace("arguments", "parameters"), "", 2),
    (LLAMA, f"{CALL} or so".replace("arguments", "parameters"),
     f"{CALL} or so".replace("arguments", "parameters"), 0),
    (TAGGED, "<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, 0),
    (LLAMA, "{x} is a set", "{x} is a set", 0),
    (LLAMA, "It is {x}", "It is {x}", 0),
]  # fmt: skip


@pytest.mark.parametrize(("how", "said", "text", "count"), SAID)
def test_H1_any_chunking_tells_the_same(how, said, text, count):
    rng = random.Random(0)
    for _ in range(50):
        splitter, shown, rest = how.splitter(), "", said
        while rest:
            size = rng.randint(1, 6)
            shown += splitter.feed(rest[:size])
            rest = rest[size:]
        left, found = splitter.end()
        assert shown + left == text
        assert len(found) == count
        for call in found:
            assert json.loads(call["function"]["arguments"]) == {"a": "é"}
