"""OpenAI's API over HTTP: the same answers as the engine's, whole and streamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.sequence import SamplingParams
from tests.server import rig

PROMPT = "the cat and the dog and the cat and the dog"
SETTINGS = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}]


@pytest.fixture(scope="module")
def server():
    with rig.running() as made:
        yield made
        made.wait_idle()


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
def test_text_is_the_engines_own_with_speculation_and_without(server, settings):
    (expected,) = rig.llm().generate(PROMPT, SamplingParams(max_tokens=40, **settings))
    for speculation in ({}, {"enabled": False}, {"k": 2}):
        body = {"prompt": PROMPT, "max_tokens": 40, "speculation": speculation, **settings}
        whole = server.complete(**body)
        (choice,) = whole["choices"]
        assert choice["text"] == expected.text
        assert choice["finish_reason"] == str(expected.finish_reason)
        events = server.stream("/v1/completions", **body)
        assert "".join(e["choices"][0]["text"] for e in events) == expected.text
        details = whole["usage"]["completion_tokens_details"]
        drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        assert (drafted > 0) == (speculation.get("enabled", True))
        assert whole["usage"]["completion_tokens"] == len(expected.token_ids)
        assert whole["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
def test_chat_streams_what_it_answers_whole(server, settings):
    body = {"max_tokens": 30, "n": 2, "logprobs": True, "top_logprobs": 2, **settings}
    whole = server.chat("hello", **body)
    events = server.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        stream_options={"include_usage": True},
        **body,
    )
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        parts = [
            e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]
        ]
        assert parts[0]["delta"]["role"] == "assistant"
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"]
        logprobs = [x for part in parts if part["logprobs"] for x in part["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    counts = whole["usage"]
    assert len(whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    tokens = sum(len(choice["logprobs"]["content"]) for choice in whole["choices"])
    assert tokens == counts["completion_tokens"]


def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "temperature": 0.9, "top_p": 0.9, "seed": 3, "stop": ["zz"], "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1,
        "min_tokens": 3, "max_tokens": 24, "stop_token_ids": [9], "bad_token_ids": [11],
        "logprobs": 3, "n": 2,
    }  # fmt: skip
    bias = {100: 2.0, 12: -100.0}
    expected = rig.llm().generate(PROMPT, SamplingParams(**fields, logit_bias=bias))
    wire = {str(token): value for token, value in bias.items()}
    answer = server.complete(prompt=PROMPT, **fields, logit_bias=wire)
    assert [c["text"] for c in answer["choices"]] == [r.text for r in expected]
    for choice, result in zip(answer["choices"], expected, strict=True):
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            [each.logprob for each in result.logprobs], abs=1e-4
        )
        assert all(len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])


def test_what_a_request_does_not_say_is_as_the_models_maker_recommends():
    own = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2}
    engine = rig.llm()
    engine.target = replace(engine.target, recommended=own)
    with rig.running(engine=engine) as server:
        (model,) = server.http.get("/v1/models").json()["data"]
        assert model["sampling"] == own
        body = {"prompt": PROMPT, "seed": 3, "max_tokens": 40}
        for given in ({}, {"temperature": 1.5}, {"temperature": 0, "repetition_penalty": 1}):
            params = SamplingParams(**{**own, **given}, seed=3, max_tokens=40)
            (expected,) = rig.llm().generate(PROMPT, params)
            said = server.complete(**body, **given)["choices"][0]["text"]
            streamed = server.stream("/v1/completions", **body, **given)
            assert said == "".join(e["choices"][0]["text"] for e in streamed) == expected.text
        assert (
            server.chat(seed=1, max_tokens=9)["choices"]
            == server.chat(**own, seed=1, max_tokens=9)["choices"]
        )
    assert rig.llm().params() == SamplingParams()
    assert engine.params(top_k=2) == SamplingParams(**own | {"top_k": 2})


@pytest.mark.parametrize("logprobs", [None, 0, 1, 20])
@pytest.mark.parametrize("stream", [False, True])
def test_F2_logprobs_of_every_size(server, logprobs, stream):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": logprobs}
    if stream:
        parts = [e["choices"][0] for e in server.stream("/v1/completions", **body)]
    else:
        parts = server.complete(**body)["choices"]
    assert all((part["logprobs"] is None) == (logprobs is None) for part in parts)
    if logprobs is not None:
        assert sum(len(part["logprobs"]["tokens"]) for part in parts) == 4


def test_many_prompts_and_token_ids(server):
    tokens = server.post("/tokenize", prompt=PROMPT).json()["tokens"]
    single = server.complete(prompt=PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    answer = server.complete(prompt=[tokens, tokens], max_tokens=8, temperature=0, n=2)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == [single] * 4
    assert answer["usage"]["prompt_tokens"] == 2 * len(tokens)
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == PROMPT
    of_chat = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    text = server.post("/detokenize", tokens=of_chat["tokens"]).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_pieces_say_who_supplied_the_text(server):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    events = server.stream("/v1/completions", speculation={"report": True}, **body)
    parts = [event["choices"][0] for event in events]
    for part in parts:
        assert "".join(text for text, _ in part["speculation"]["pieces"]) == part["text"]
    drafted = [flag for part in parts for flag in part["speculation"]["from_draft"]]
    usage = server.complete(**body)["usage"]
    assert sum(drafted) == usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_a_trace_tells_each_steps_tree(server):
    letters = server.post("/tokenize", prompt="ABCD").json()["tokens"]
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "allowed_token_ids": letters}
    events = server.stream("/v1/completions", speculation={"trace": True}, **body)
    found = [event["choices"][0]["speculation"] for event in events]
    assert max(len(step["trees"]) for step in found) == 1
    last, drafted, accepted = PROMPT[-1:], 0, 0
    for step in found:
        for tree in step["trees"]:
            assert len(tree["texts"]) == len(tree["parents"]) > 0
            assert tree["parents"][0] == -1
            assert tree["texts"][0].endswith(last)
            path = [0, *tree["accepted"]]
            assert [tree["parents"][node] for node in path] == [-1, *path[:-1]]
            assert len(tree["accepted"]) == sum(step["from_draft"])
            guessed = "".join(tree["texts"][node] for node in tree["accepted"])
            assert guessed == "".join(text for text, drafted in step["pieces"] if drafted)
            drafted += len(tree["texts"]) - 1
            accepted += len(tree["accepted"])
            last = "".join(text for text, _ in step["pieces"])[-1:]
    usage = server.complete(**body)["usage"]["completion_tokens_details"]
    assert accepted == usage["accepted_prediction_tokens"] > 0
    assert drafted >= accepted + usage["rejected_prediction_tokens"] > accepted
    for name in ("trace", "report"):
        answer = server.post("/v1/completions", **body, speculation={name: True})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"speculation.{name}"
    untold = server.stream("/v1/completions", speculation={"report": True}, **body)
    assert all("trees" not in event["choices"][0]["speculation"] for event in untold)


def test_a_prediction_is_drafted_from(server):
    letters = server.post("/tokenize", prompt="ABCDEFGHIJKLMNOPQRSTUVWXYZ").json()["tokens"]
    body = {"prompt": "xyz", "max_tokens": 40, "seed": 1, "allowed_token_ids": letters}
    plain = server.complete(**body)
    (choice,) = plain["choices"]
    told = server.complete(**body, prediction={"type": "content", "content": choice["text"]})
    assert told["choices"][0]["text"] == choice["text"]
    before, after = plain["usage"]["speculation"], told["usage"]["speculation"]
    assert after["tokens_per_pass"] > 4 > before["tokens_per_pass"]
    wrong = server.complete(**body, prediction={"type": "content", "content": "no such thing"})
    assert wrong["choices"][0]["text"] == choice["text"]


def test_a_request_may_choose_among_several_schemes(monkeypatch):
    both = "prompt-lookup:k=6,ngram_min=1,patience=0+draft-model:weights=target,k=3"
    with rig.running(both) as server:
        (model,) = server.http.get("/v1/models").json()["data"]
        assert model["speculation"]["method"] == "prompt-lookup+draft-model"
        drafting, seen = server.llm.engine.drafting, set()
        seat = drafting.seat

        def watched(*given):
            found = seat(*given)
            seen.add(tuple(limit.nodes > 0 for limit in found.limits))
            return found

        monkeypatch.setattr(drafting, "seat", watched)
        cases = {None: (True, True), "prompt_lookup": (True, False), "draft-model": (False, True)}
        texts = set()
        for method, may_draft in cases.items():
            seen.clear()
            body = {"prompt": PROMPT, "max_tokens": 30, "seed": 2}
            answer = server.complete(**body, speculation={"method": method})
            texts.add(answer["choices"][0]["text"])
            assert seen - {(False, False)} == {may_draft}  # nobody drafts an answer's last token
        assert len(texts) == 1
        refused = server.post("/v1/completions", prompt="x", speculation={"method": "eagle"})
        assert "prompt-lookup+draft-model" in refused.json()["error"]["message"]
        assert 'foretell_drafted_tokens_total{scheme="draft-model"}' in (
            server.http.get("/metrics").text
        )
        total = server.llm.engine.metrics
        assert sum(each.drafted for each in total.by_scheme.values()) == total.drafted
        assert sum(each.accepted for each in total.by_scheme.values()) == total.accepted


def test_models_health_metrics_and_page(server):
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["speculation"] == {"method": "prompt-lookup", "k": 6, "verification": "coupled"}
    assert server.http.get("/v1/models/tiny").json() == model
    assert server.http.get("/health").json()["status"] == "ok"
    server.complete(prompt=PROMPT, max_tokens=20, temperature=0)
    text = server.http.get("/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    scheme = '{scheme="prompt-lookup"}'
    assert values[f"foretell_accepted_tokens_total{scheme}"] > 0
    assert (
        values[f"foretell_accepted_tokens_total{scheme}"]
        <= values[f"foretell_drafted_tokens_total{scheme}"]
    )
    assert values["foretell_kv_pages_free"] == values["foretell_kv_pages"]
    assert values["foretell_time_to_first_token_seconds_count"] > 0
    page = server.http.get("/")
    assert "text/html" in page.headers["content-type"]
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text


def test_openais_own_client(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": "hello"}]
    settings = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "seed": 1}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=1, **settings)
    text = answer.choices[0].message.content
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **settings
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == answer.usage
    # What the client makes of an answer can be sent back as it is.
    messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    client.chat.completions.create(**settings)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(modalities=["audio"], **settings)
    assert caught.value.param == "modalities"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**(settings | {"model": "other"}))
