"""What is refused is refused by name, in OpenAI's shape, and the next request is served."""

from __future__ import annotations

import json

import pytest

from tests.server import rig

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PLAIN = {"prompt": "hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    with rig.running() as made:
        yield made
        made.wait_idle()


@pytest.fixture(scope="module")
def undrafted():
    with rig.running(None) as made:
        yield made


def check(answer, status: int, param: str | None = None, code: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert "x-request-id" in answer.headers
    (name,) = answer.json()
    assert name == "error"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert param is None or error["param"] == param, error
    assert code is None or error["code"] == code, error
    return error["message"]


BOTH = {
    "temperature": [-1, "hot", True, float("nan")],
    "top_p": [0, 1.5],
    "n": [0, 1000, 1.5],
    "stop": [[""], [1]],
    "seed": [2**70, "x"],
    "max_tokens": [0, -1],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "logit_bias": [
        {"x": 1},
        {"9" * 5000: 1},
        {"\u0661": 1},
        {"5": 1000},
        {"99999999": 1},
        {"-1": 1},
    ],
    "top_k": [-1],
    "min_p": [2],
    "repetition_penalty": [0],
    "min_tokens": [-1, 5],
    "stop_token_ids": [[10**9], [-1]],
    "bad_token_ids": [[10**9]],
    "allowed_token_ids": [[], [10**9]],
    "stream_options": [{"include_usage": True}],
    "speculation": [{"k": 0}, {"k": 50}, {"method": "eagle"}, {"enabled": 1}, {"x": 1}],
    "prediction": [{"type": "image"}, "text", {"content": "x" * 600}],
    "store": [True],
    "metadata": [{"a": "b"}],
    "service_tier": ["flex"],
    "nonsense": [1],
}
OF_CHAT = {
    "messages": [
        [], "hi", [{"role": "robot", "content": "x"}], [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "x", "weight": 1}],
    ],
    "top_logprobs": [3],
    "logprobs": [3],
    "modalities": [["audio"]],
    "audio": [{"voice": "x"}],
    "functions": [[{"name": "f"}]],
    "web_search_options": [{}],
    "echo": [True],
}  # fmt: skip
OF_COMPLETIONS = {
    "prompt": [[], "", [[]], [-1], [10**9], [True], 5],
    "logprobs": [21, -1, True],
    "echo": [True],
    "suffix": ["x"],
    "best_of": [3],
    "messages": [[]],
}


def cases(*tables: dict) -> list[tuple[str, object]]:
    return [(name, value) for table in tables for name in table for value in table[name]]


@pytest.mark.parametrize(("field", "value"), cases(BOTH, OF_CHAT), ids=str)
def test_chat_names_the_field(server, field, value):
    body = json.dumps(CHAT | {field: value})
    answer = server.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    message = check(answer, 400)
    named = answer.json()["error"]["param"] or ""
    assert named.startswith(field) or field in message, answer.text


@pytest.mark.parametrize(("field", "value"), cases(BOTH, OF_COMPLETIONS), ids=str)
def test_completions_name_the_field(server, field, value):
    body = json.dumps(PLAIN | {field: value})
    answer = server.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    message = check(answer, 400)
    named = answer.json()["error"]["param"] or ""
    assert named.startswith(field) or field in message, answer.text


def test_after_all_that_it_still_serves(server):
    server.chat(max_tokens=2)
    for name in [*BOTH, *OF_CHAT]:  # null is as if not given
        if name not in ("messages", "nonsense", "echo"):
            server.chat(**{"max_tokens": 2, name: None})


def test_too_many_prompts_are_not_even_looked_at(server, monkeypatch):
    monkeypatch.setattr(server.llm, "sequences", None)
    check(server.post("/v1/completions", prompt=["x"] * 1000), 400, "n")


def test_a_context_that_is_too_long(server):
    answer = server.post("/v1/completions", prompt=[5] * 600)
    check(answer, 400, code="context_length_exceeded")
    assert "512" in answer.json()["error"]["message"]


def test_no_such_model_path_method_or_json(server):
    check(server.post("/v1/completions", **PLAIN, model="gpt"), 404, "model", "model_not_found")
    check(server.http.get("/v1/models/gpt"), 404, "model", "model_not_found")
    check(server.http.get("/nowhere"), 404)
    check(server.http.get("/v1/completions"), 405)
    headers = {"Content-Type": "application/json"}
    check(server.http.post("/v1/completions", content=b"{", headers=headers), 400, None)
    check(server.http.post("/v1/completions", content=b"[1]", headers=headers), 400)
    latin = '{"prompt": "caf\xe9"}'.encode("latin-1")
    assert "UTF-8" in check(
        server.http.post("/v1/completions", content=latin, headers=headers), 400
    )
    assert "no answer" in check(
        server.post("/v1/completions", **PLAIN, grammar="start: start"), 400
    )
    # A page of another origin could send this one without asking the browser's leave.
    plain = {"Content-Type": "text/plain"}
    check(server.http.post("/v1/completions", content=json.dumps(PLAIN), headers=plain), 400)


def test_predictions_need_a_scheme_that_reads_them(undrafted):
    prediction = {"type": "content", "content": "x"}
    check(undrafted.post("/v1/completions", **PLAIN, prediction=prediction), 400, "prediction")
    check(undrafted.post("/v1/completions", **PLAIN, speculation={"k": 2}), 400, "speculation.k")
    undrafted.complete(**PLAIN, speculation={"enabled": False})


def test_detokenize_and_tokenize_check_too(server):
    check(server.post("/detokenize", tokens=[10**6]), 400, "tokens")
    check(server.post("/tokenize"), 400)
    check(server.post("/tokenize", prompt="x", messages=[]), 400)


HALF = "\\ud83d"  # as JSON writes half of an emoji
BODIES = [
    ("/v1/completions", '{"prompt": "a HALF b"}'),
    ("/v1/completions", '{"prompt": "a", "stop": "HALF"}'),
    ("/v1/completions", '{"prompt": "a", "HALF": "x"}'),
    ("/v1/completions", '{"prompt": "a", "prediction": {"content": "HALF"}}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "HALF"}]}'),
    ("/tokenize", '{"prompt": "HALF"}'),
    ("/v1/completions", '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    ("/v1/completions", '{"prompt": "a", "seed": ' + "9" * 5000 + "}"),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_JSON_that_is_no_request(server, path, body):
    headers = {"Content-Type": "application/json"}
    for half in (HALF.encode(), b"\xed\xa0\xbd"):
        content = body.encode().replace(b"HALF", half)
        check(server.http.post(path, content=content, headers=headers), 400, code="invalid_json")
    whole = body.replace("HALF", HALF + "\\ude00")
    answer = server.http.post(path, content=whole.encode(), headers=headers)
    assert "surrogate" not in answer.text


@pytest.mark.parametrize("arguments", ["{", "[" * 50_000, '{"a": "' + HALF + '"}'])
def test_arguments_of_calls_that_are_no_json(server, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    check(server.post("/v1/chat/completions", messages=messages), 400, "messages")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
        {"enum": [str(i) for i in range(40_000)]},
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(40)]},
        {"type": "string", "pattern": "^b?a{30000}$"},
    ],
    ids=["endless", "wide", "long", "at once", "repeats"],
)
def test_a_schema_that_is_too_much_is_the_requests_fault(server, schema):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = CHAT | {"max_tokens": 40, "seed": 1, "response_format": form}
    message = check(server.post("/v1/chat/completions", **body), 400)
    assert len(message) < 300
    assert message.startswith(("response_format:", "grammar:"))
    server.chat(max_tokens=2)
