"""Real clients: OpenAI's package, LangChain and curl, with tools in three ways of calling them."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from foretell.models.chat_template import ChatTemplate
from foretell.models.tokenizer import Tokenizer
from tests.server import rig

# What the templates of three families say about tools, in small.
_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
_HERMES = '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'  # noqa: E501
TEMPLATES = {
    "hermes": "{% for t in tools or [] %}<tools>{{ t.function.name }}</tools>{% endfor %}"
    + _TURNS.replace("CALL", _HERMES),
    "smollm2": "{% if tools %}<tool_call>[{...}]</tool_call>{{ tools[0].function.name }}{% endif %}"
    + _TURNS.replace("CALL", "{{ c.function | tojson }}"),
    "llama3": "{% if tools %}ipython; answer with name and parameters{% endif %}"
    + _TURNS.replace("CALL", '{"name": "x", "parameters": {{ c.function.arguments | tojson }}}'),
}
CITY = {"type": "object", "properties": {"city": {"enum": ["ROME", "BONN"]}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "description": "now", "parameters": CITY}},
]
USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["ROME", "BONN"]}, "n": {"enum": [1]}},
          "required": ["city", "n"], "additionalProperties": False}  # fmt: skip


@contextmanager
def serving(template: str):
    engine = rig.llm(rig.LOOKUP)
    engine.tokenizer = Tokenizer(rig.model().tokenizer.inner, "tiny", ChatTemplate(template, {}))
    with rig.running(engine=engine) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    with serving(TEMPLATES[request.param]) as server:
        server.family = request.param
        yield server


@pytest.fixture(scope="module")
def server():
    with serving(TEMPLATES["hermes"]) as made:
        yield made


@pytest.fixture
def client(family):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=family.url + "/v1", api_key="none", max_retries=0)


def assembled(stream) -> tuple[list[dict], str, str | None]:
    """What a client puts together from a stream's deltas: calls, text, and why it ended."""
    calls: dict[int, dict] = {}
    text, end = "", None
    for chunk in stream:
        (choice,) = chunk.choices
        text, end = text + (choice.delta.content or ""), choice.finish_reason or end
        for part in choice.delta.tool_calls or []:
            call = calls.setdefault(part.index, {"name": "", "arguments": ""})
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
    return [calls[i] for i in sorted(calls)], text, end


@pytest.mark.parametrize("choice", ["required", "time"])
def test_tools_through_openais_package(client, choice):
    named = {"type": "function", "function": {"name": choice}}
    settings = {
        "model": "tiny", "messages": USER, "tools": TOOLS, "seed": 3, "max_tokens": 200,
        "tool_choice": choice if choice == "required" else named, "parallel_tool_calls": False,
    }  # fmt: skip
    answer = client.chat.completions.create(**settings)
    (picked,) = answer.choices
    assert picked.finish_reason == "tool_calls"
    (call,) = picked.message.tool_calls
    assert call.function.name in ("weather", "time")
    assert choice in ("required", call.function.name)
    assert json.loads(call.function.arguments)["city"] in ("ROME", "BONN")
    calls, text, end = assembled(client.chat.completions.create(stream=True, **settings))
    assert calls == [{"name": call.function.name, "arguments": call.function.arguments}]
    assert (text, end) == ("", "tool_calls")
    # The conversation goes on with what the tool said.
    after = [
        *USER, picked.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]  # fmt: skip
    more = client.chat.completions.create(
        model="tiny", messages=after, tools=TOOLS, tool_choice="none", max_tokens=8, seed=1
    )
    assert more.choices[0].message.tool_calls is None


@pytest.mark.parametrize(("tokens", "end"), [(60, "length"), (400, "tool_calls")])
def test_arguments_come_while_the_model_writes_them(client, tokens, end):
    text = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 40}},
            "required": ["text"], "additionalProperties": False}  # fmt: skip
    text["properties"]["text"]["minLength"] = 40
    say = {"type": "function", "function": {"name": "say", "parameters": text}}
    settings = {"model": "tiny", "messages": USER, "tools": [say], "tool_choice": "required",
                "parallel_tool_calls": False, "max_tokens": tokens, "seed": 1}  # fmt: skip
    (whole,) = client.chat.completions.create(**settings).choices
    chunks = [c.choices[0] for c in client.chat.completions.create(stream=True, **settings)]
    deltas = [d for chunk in chunks for d in chunk.delta.tool_calls or []]
    first, *others = deltas
    assert first.id.startswith("call_")
    assert (first.type, first.function.name, first.index) == ("function", "say", 0)
    assert all((d.id, d.type, d.function.name, d.index) == (None,) * 3 + (0,) for d in others)
    assert len(others) > 2, "a step's worth each"
    streamed = "".join(d.function.arguments for d in deltas)
    assert streamed == whole.message.tool_calls[0].function.arguments
    assert streamed.startswith('{"text": "')
    assert chunks[-1].finish_reason == whole.finish_reason == end
    if end == "tool_calls":
        with client.chat.completions.stream(**settings) as events:  # put together by the client
            (choice,) = events.get_final_completion().choices
        assert choice.message.tool_calls[0].function.arguments == streamed
        assert len(json.loads(streamed)["text"]) == 40


def test_several_calls_in_one_answer(client, family):
    counts = []
    # A random model: some of its answers end, others never do and are cut.
    (between,) = family.llm.tokenizer.encode(";")
    bias = {"1": 3, str(between): 50} if family.family == "llama3" else {"1": 3}
    for seed in range(8):
        settings = {
            "model": "tiny", "messages": USER, "tools": TOOLS, "seed": seed, "max_tokens": 150,
            "tool_choice": "required", "logit_bias": bias,
        }  # fmt: skip
        (picked,) = client.chat.completions.create(**settings).choices
        streamed = assembled(client.chat.completions.create(stream=True, **settings))
        made = [call.function for call in picked.message.tool_calls]
        calls = [{"name": f.name, "arguments": f.arguments} for f in made]
        assert streamed == (calls, picked.message.content or "", picked.finish_reason)
        assert len({call.id for call in picked.message.tool_calls}) == len(made)
        counts.append(len(made))
    assert max(counts) >= 2


def test_a_model_that_may_choose_is_free(client):
    settings = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 20, "seed": 2}
    (told,) = client.chat.completions.create(tool_choice="auto", **settings).choices
    calls, text, end = assembled(client.chat.completions.create(stream=True, **settings))
    assert (calls, text, end) == ([], told.message.content, told.finish_reason)


def test_json_schema_and_logprobs_through_openais_package(client):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    settings = {"model": "tiny", "messages": USER, "response_format": form, "max_tokens": 200}
    answer = client.chat.completions.create(seed=1, logprobs=True, top_logprobs=3, **settings)
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "n"}
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0, "keys are forced, so they are drafted"


def test_langchain(server):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model="tiny", seed=1, max_tokens=150,
        max_retries=0, stream_usage=True,
    )  # fmt: skip
    whole = chat.invoke("hello")
    chunks = list(chat.stream("hello"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert (
        sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata)
        == (whole.usage_metadata["output_tokens"])
    )
    made = chat.bind_tools(TOOLS, tool_choice="weather", parallel_tool_calls=False).invoke("hi")
    assert [call["name"] for call in made.tool_calls] == ["weather"]
    assert made.tool_calls[0]["args"]["city"] in ("ROME", "BONN")
    obeyed = chat.with_structured_output(
        {"title": "place", **SCHEMA}, method="json_schema", strict=True
    ).invoke("hi")
    assert set(obeyed) == {"city", "n"}
    with pytest.raises(Exception, match="temperature"):
        chat.invoke("hello", temperature=-1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server):
    def curl(*args: str) -> str:
        return subprocess.run(
            ["curl", "-sS", "--max-time", "60", *args], capture_output=True, text=True, check=True
        ).stdout

    body = {"messages": USER, "max_tokens": 12, "seed": 1}
    post = [server.url + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
    text = json.loads(curl(*post, json.dumps(body)))["choices"][0]["message"]["content"]
    events = curl("-N", *post, json.dumps(body | {"stream": True})).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"] for e in events[:-2]]
    assert "".join(part.get("content", "") for part in parts) == text
    assert "error" in json.loads(curl(*post, "{"))
    assert curl("-o", "-", "-w", "%{http_code}", server.url + "/health").endswith("200")
