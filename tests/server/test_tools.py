"""Tools: calls that obey their schema, whole and streamed, and text that stays text."""

from __future__ import annotations

import json
import random

import pytest

from foretell.models.chat_template import ChatTemplate
from foretell.models.tokenizer import Tokenizer
from foretell.server.splitter import put_together
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
    deltas = [c for part in parts for c in part["delta"].get("tool_calls", [])]
    assert [c["function"] for c in put_together(deltas)] == [c["function"] for c in made]
    assert len(deltas) > len(made), "a call comes in pieces"
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
CALL = '{"name": "f", "arguments": {"a": "é", "b": {"c": ["}", "\\"", "</tool_call>"]}}}'
TURNED = '{"arguments": {"a": "é"}, "name": "f"}'
MORE = CALL[:-1] + ', "id": {"x": 1}}'
CUT = CALL[: CALL.index("é")]
BARE = CALL.replace("arguments", "parameters")
ARGUMENTS = {"a": "é", "b": {"c": ["}", '"', "</tool_call>"]}}
SAID = [  # what the model writes, what of it is text, and how many calls are in it
    (TAGGED, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    (TAGGED, f"well <tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "well", 2),
    (TAGGED, f"well\n<tool_call>{CALL}</tool_call>\n or so ", "well\n\n or so", 1),
    (TAGGED, f"<tool_call>{MORE}</tool_call><tool_call>{CALL}; {CALL}", "", 3),
    (TAGGED, f"<tool_call>{CALL}", "", 1),  # cut behind the call
    (TAGGED, f"<tool_call>{CALL}\n</tool", "", 1),
    (TAGGED, "a < b <tool", "a < b <tool", 0),
    (TAGGED, " a <tool_call> \n", " a <tool_call> \n", 0),
    (TAGGED, "<tool_call>{not json}</tool_call> x", "<tool_call>{not json}</tool_call> x", 0),
    (TAGGED, f"<tool_call><tool_call>{CALL}", "<tool_call>", 1),
    (TAGGED, WRONG, WRONG, 0),
    (TAGGED, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', 0),
    (LISTED, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", 2),
    (LISTED, "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", 0),
    (LLAMA, BARE, "", 1),
    (LLAMA, f"\n{BARE}; {BARE}", "", 2),
    (LLAMA, f"{BARE} or so {BARE}", f"or so {BARE}", 1),
    (LLAMA, "{x} is a set", "{x} is a set", 0),
    (LLAMA, f"It is {BARE}", f"It is {BARE}", 0),
    (TAGGED, "<tool_call>" + "[" * 10_000, "<tool_call>" + "[" * 10_000, 0),
    (TAGGED, '<tool_call>{"a":' + "[" * 10_000 + "]" * 10_000 + "}", None, 0),
]


def split(how: Calls, parts: list[str]) -> tuple[list[str], list[list[dict]]]:
    """Text and deltas of calls after each part."""
    splitter = how.splitter()
    news = [*(splitter.feed(part) for part in parts), splitter.end()]
    return [text for text, _ in news], [deltas for _, deltas in news]


def cut(said: str, rng: random.Random) -> list[str]:
    at = sorted(rng.sample(range(len(said) + 1), min(len(said), rng.randint(0, 9))))
    return [said[a:b] for a, b in zip([0, *at], [*at, len(said)], strict=True)]


@pytest.mark.parametrize(("how", "said", "text", "count"), SAID)
def test_H1_any_chunking_tells_the_same(how, said, text, count):
    rng = random.Random(0)
    borders = range(min(len(said), 200))
    for parts in [[said], list(said), *([said[:i], said[i:]] for i in borders),
                  *(cut(said, rng) for _ in range(50))]:  # fmt: skip
        texts, deltas = split(how, parts)
        assert "".join(texts) == (said if text is None else text)
        found = put_together([delta for part in deltas for delta in part])
        assert [call["function"]["name"] for call in found] == ["f"] * count
        assert len({call["id"] for call in found}) == count
        assert all(json.loads(c["function"]["arguments"]) == ARGUMENTS for c in found)


def test_arguments_go_out_as_they_come():
    said = f"<tool_call>{CALL}</tool_call>"
    _, deltas = split(TAGGED, list(said))
    first, *others = [delta for part in deltas for delta in part]
    assert (first["index"], first["type"]) == (0, "function")
    assert first["function"] == {"name": "f", "arguments": "{"}
    assert all(set(d) == {"index", "function"} and set(d["function"]) == {"arguments"}
               for d in others)  # fmt: skip
    assert "".join(d["function"]["arguments"] for d in others) in said
    known = next(i for i, part in enumerate(deltas) if part)
    assert said[:known].endswith('"arguments": '), "at the first character that makes it sure"


def test_what_comes_in_another_order_is_a_call_too():
    for more in ("", "; " + TURNED):
        texts, deltas = split(TAGGED, ["<tool_call>", TURNED + more, "</tool_call>"])
        found = put_together([delta for part in deltas for delta in part])
        assert [json.loads(c["function"]["arguments"]) for c in found] == [{"a": "é"}] * len(found)
        assert (len(found), "".join(texts)) == (1 + bool(more), "")


@pytest.mark.parametrize(
    ("how", "said"), [(TAGGED, "<tool_call>" + CUT), (LISTED, "<tool_call>[" + CUT),
                      (LLAMA, CUT.replace("arguments", "parameters"))],
)  # fmt: skip
def test_a_call_that_is_cut_is_told_as_far_as_it_came(how, said):
    texts, deltas = split(how, list(said))
    (call,) = put_together([delta for part in deltas for delta in part])
    assert call["function"] == {"name": "f", "arguments": '{"a": "'}
    assert "".join(texts) == ""
