"""Known faults of speculating servers (kinds A, F, G, H, I, J, N and O), over HTTP.

The engine's own tests try them in depth; here a running server answers under scripted drafters that
are always right, always wrong and in between, whole and streamed, and what comes over the wire is
what the plain engine says. H2 and the chunking of tools are in `test_tools`, F4 in `test_errors`.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretell.drafters.prompt_lookup import NgramIndex
from foretell.sequence import SamplingParams
from tests.fakes import Scripted
from tests.server import rig
from tests.server.test_errors import check

RIGHT, WRONG = "tests.fakes:Oracle,k=6", "tests.fakes:Hostile,k=6"
MIXED, SELF = "tests.fakes:Mixed,k=5", "draft-model:weights=target,k=4"
SCHEMES = [RIGHT, WRONG, MIXED, SELF, rig.LOOKUP]
PROMPTS = ["the cat and the cat and the cat", "then in another", "a", "hen and the hen and", "xyz"]
SETTINGS = {"max_tokens": 40, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain():
    return rig.llm()


@pytest.fixture(scope="module")
def answers(plain):
    """What the plain engine says to each prompt, far past any end, told to scripted drafters."""
    results = plain.generate(PROMPTS, SamplingParams(**SETTINGS | {"max_tokens": 80}))
    patch = pytest.MonkeyPatch()
    found = {tuple(r.prompt_token_ids): r.token_ids for r in results}
    patch.setattr(Scripted, "answers", found)
    patch.setattr(Scripted, "eos", (1,))
    yield results
    patch.undo()


@pytest.fixture(scope="module", params=SCHEMES)
def server(request, answers):
    with rig.running(request.param) as made:
        made.scheme = request.param
        yield made
        made.wait_idle()


def both(server, **body) -> list[tuple]:
    """Text, reason, log-probabilities and usage of an answer, whole and streamed."""
    whole = server.complete(**body)
    events = server.stream("/v1/completions", **body, stream_options={"include_usage": True})
    parts = [event["choices"][0] for event in events if event["choices"]]
    told = [p for part in parts if part["logprobs"] for p in part["logprobs"]["token_logprobs"]]
    (choice,) = whole["choices"]
    told_whole = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    return [
        (choice["text"], choice["finish_reason"], told_whole, whole["usage"]["completion_tokens"]),
        ("".join(part["text"] for part in parts), parts[-1]["finish_reason"], told,
         events[-1]["usage"]["completion_tokens"]),
    ]  # fmt: skip


ENDS = ["stop string", "two stop strings", "stop token", "cap", "stop behind the cap"]


@pytest.mark.parametrize("end", ENDS)
def test_A_an_end_anywhere_in_a_block_is_the_end(server, plain, answers, end):
    result = answers[0]
    for place in range(3, 20, 2):
        text = plain.tokenizer.decode(result.token_ids[place : place + 2])
        own = {
            "stop string": {"stop": [text]},
            "two stop strings": {"stop": [text[-1:], text[:1]]},
            "stop token": {"stop_token_ids": [result.token_ids[place]]},
            "cap": {"max_tokens": place},
            "stop behind the cap": {"max_tokens": place, "stop": [text]},
        }[end]
        body = SETTINGS | {"logprobs": 2} | own
        (expected,) = plain.generate(PROMPTS[0], SamplingParams(**body))
        told = [each.logprob for each in expected.logprobs]
        for text, reason, logprobs, count in both(server, prompt=PROMPTS[0], **body):
            assert (text, reason) == (expected.text, str(expected.finish_reason))
            assert logprobs == pytest.approx(told, abs=1e-4)
            assert count == len(logprobs) == len(expected.token_ids)


def test_F_eight_at_once_each_with_its_own_logprobs(server, plain):
    asked = [(PROMPTS[i % 5], None if i == 3 else i % 4) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: both(server, prompt=each[0], logprobs=each[1],
                                                **SETTINGS), asked))  # fmt: skip
    for (prompt, top), pair in zip(asked, found, strict=True):
        (expected,) = plain.generate(prompt, SamplingParams(**SETTINGS, logprobs=top))
        told = [each.logprob for each in expected.logprobs or []]
        for text, _, logprobs, _ in pair:
            assert text == expected.text
            assert logprobs == pytest.approx(told, abs=1e-4)
            assert top is None or any(value < -0.01 for value in logprobs)


PARTS = {"a": {"enum": [True, False]}, "b": {"enum": ["x", "yy"]}}
SCHEMA = {
    "type": "object",
    "properties": PARTS,
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_G_schemas_are_obeyed_and_drafts_that_break_them_are_only_rejected(server):
    near = '{"a": maybe, "b": "x"} {"a": true, "b": 5} '
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}

    def ask(seed: int) -> list[str]:
        body = {"messages": [{"role": "user", "content": near * 2}], "response_format": form,
                "max_tokens": 150, "seed": seed}  # fmt: skip
        off = server.chat(**body, speculation={"enabled": False})["choices"][0]
        on = server.chat(**body)["choices"][0]
        events = server.stream("/v1/chat/completions", **body)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert on["finish_reason"] == off["finish_reason"] == "stop"
        return [off["message"]["content"], on["message"]["content"], text]

    with ThreadPoolExecutor(6) as pool:
        for said in pool.map(ask, range(6)):
            assert len(set(said)) == 1
            assert set(json.loads(said[0])) == {"a", "b"}
    assert server.llm.engine.metrics.drafter_errors == 0


def test_H_characters_of_several_tokens_come_whole(server):
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
    body = {"prompt": PROMPTS[0], "seed": 2, "max_tokens": 200,
            "grammar": f"start: /(é|東|한|\U0001f642|{family}){{9}}/"}  # fmt: skip
    text = server.complete(**body)["choices"][0]["text"]
    events = [e["choices"][0] for e in server.stream("/v1/completions", **body)]
    assert "".join(event["text"] for event in events) == text
    assert "\ufffd" not in text
    assert len(text.encode()) > 18
    cut = body | {"max_tokens": len(text.encode()) // 2}
    pieces = [e["choices"][0]["text"] for e in server.stream("/v1/completions", **cut)]
    assert "".join(pieces) == server.complete(**cut)["choices"][0]["text"]
    assert not any("\ufffd" in piece for piece in pieces[:-1]), "flushed at the end only"


@pytest.mark.parametrize("scheme", [RIGHT, SELF, rig.LOOKUP])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 16}])
def test_I_answers_end_at_the_context_limit(scheme, settings, answers):
    with rig.running(engine=rig.llm(scheme, max_model_len=64, **settings)) as server:
        for length in (1, 2, 31, 57, 61, 62, 63):
            body = {"messages": [{"role": "user", "content": ""}], "ignore_eos": True, "seed": 1}
            whole = server.complete(prompt=[40] * length, ignore_eos=True, max_tokens=100, seed=1)
            assert whole["choices"][0]["finish_reason"] == "length"
            assert whole["usage"]["total_tokens"] == 64
            chat = server.chat(**body)  # no max_tokens: up to the limit
            assert chat["usage"]["total_tokens"] == 64
        check(server.post("/v1/completions", prompt=[40] * 64), 400, code="context_length_exceeded")
        server.wait_idle()


@pytest.mark.parametrize("scheme", [RIGHT, WRONG, SELF, rig.LOOKUP])
def test_J_no_page_is_lost_however_answers_end_and_preemption_changes_no_text(
    scheme, plain, answers
):
    engine = rig.llm(scheme, kv_memory="120kB" if scheme == SELF else "70kB", max_model_len=128)
    with rig.running(engine=engine) as server, ThreadPoolExecutor(8) as pool:

        def ask(i: int) -> tuple[int, str]:
            own = [{}, {"stop": "e"}, {"max_tokens": 3}, {"n": 2}][i % 4]
            body = SETTINGS | {"max_tokens": 80, "prompt": PROMPTS[i % 5]} | own
            if i % 7 == 6:  # goes away after the first piece
                with server.http.stream(
                    "POST", "/v1/completions", json=body | {"stream": True}
                ) as got:
                    next(got.iter_lines())
                return i, ""
            return i, server.complete(**body)["choices"][-1]["text"]

        found = dict(pool.map(ask, range(60)))
        server.wait_idle()
        assert engine.engine.scheduler.num_preemptions > 0
        assert server.app.state.service.bridge.num_open == 0
    for i, text in found.items():
        own = [{}, {"stop": "e"}, {"max_tokens": 3}, {"n": 2}][i % 4]
        if i % 7 != 6:
            params = SamplingParams(**SETTINGS | {"max_tokens": 80} | own)
            assert text == plain.generate(PROMPTS[i % 5], params)[-1].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_N_logits_that_are_no_numbers_fail_their_request_only(server, plain, value, stream):
    victim = plain.tokenizer.encode("poison")
    runtime, engine = server.llm.engine.runtime, server.llm.engine
    real = runtime.forward_target

    def spoiled(rows):
        output = real(rows)
        for o, row in enumerate(rows.outputs):
            slot = rows.slots[row]
            (sequence,) = (s for s in engine.scheduler.running if s.slot == slot)
            behind = rows.positions[row] >= len(victim) + 4
            if sequence.tokens[: len(victim)] == victim and behind:
                output.logits[o] = value
        return output

    runtime.forward_target = spoiled
    try:
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(server.complete, prompt=p, **SETTINGS) for p in PROMPTS[:3]]
            body = {"prompt": "poison", **SETTINGS}
            if stream:
                with server.http.stream(
                    "POST", "/v1/completions", json=body | {"stream": True}
                ) as got:
                    lines = [line.removeprefix("data: ") for line in got.iter_lines() if line]
                error = json.loads(lines[-1])["error"]
                assert (error["type"], error["code"]) == ("server_error", "answer_failed")
            else:
                check(server.post("/v1/completions", **body), 500, code="answer_failed")
            for prompt, future in zip(PROMPTS, others, strict=False):
                (expected,) = plain.generate(prompt, SamplingParams(**SETTINGS))
                assert future.result()["choices"][0]["text"] == expected.text
    finally:
        runtime.forward_target = real
    server.wait_idle()


RATES = {RIGHT: 1.0, SELF: 1.0, WRONG: 0.0}


def scraped(server) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name.endswith(("_total", "_count"))
    }


def test_O_figures_add_up_and_never_go_down(answers):
    for scheme in SCHEMES:
        with rig.running(scheme) as server:
            before, usages = scraped(server), []
            for i, prompt in enumerate(PROMPTS):
                own = {"stop": ["e"]} if i % 2 else {"max_tokens": 25 + i}
                usages.append(server.complete(prompt=prompt, **SETTINGS | own)["usage"])
                now = scraped(server)
                assert all(now[name] >= value for name, value in before.items())
                before = now
            total = {key[0]: value for key, value in before.items() if len(key) < 3}
            details = [usage["completion_tokens_details"] for usage in usages]
            accepted = sum(each["accepted_prediction_tokens"] for each in details)
            rejected = sum(each["rejected_prediction_tokens"] for each in details)
            tokens = sum(usage["completion_tokens"] for usage in usages)
            assert total["foretell_accepted_tokens_total"] == accepted
            assert total["foretell_drafted_tokens_total"] == accepted + rejected > 0
            assert total["foretell_generated_tokens_total"] == tokens
            passes = sum(usage["speculation"]["target_passes"] for usage in usages)
            assert total["foretell_answer_passes_total"] == passes
            assert tokens - passes <= accepted <= tokens
            if scheme in RATES:
                assert accepted == RATES[scheme] * (accepted + rejected)
            for usage in usages:
                drafted = usage["speculation"]["drafted_by_position"]
                kept = usage["speculation"]["accepted_by_position"]
                assert drafted == sorted(drafted, reverse=True)
                assert kept == sorted(kept, reverse=True)
                assert len(kept) <= len(drafted)
            plainly = server.complete(prompt="a", **SETTINGS, speculation={"enabled": False})
            assert plainly["usage"]["speculation"]["tokens_per_pass"] == 1.0


LOADS = [1, 12, 1, 3, 12, 6, 1]


@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_O2_drafts_give_way_to_load_and_come_back_as_good_as_before(answers, adaptive):
    """Rows for 4 draft tokens are left beside 12 answers. What is drafted stays right throughout:
    the drafter has missed nothing while it was not asked."""
    scheme = f"{SELF},adaptive={adaptive}"
    engine = rig.llm(scheme, max_num_seqs=12, max_num_batched_tokens=16)
    with rig.running(engine=engine) as server, ThreadPoolExecutor(12) as pool:
        share: dict[int, list[float]] = {}
        for load in LOADS:
            asked = [PROMPTS[i % 5] for i in range(load)]
            found = list(pool.map(lambda p: server.complete(prompt=p, **SETTINGS), asked))
            said = [each["choices"][0]["text"] for each in found]
            assert said == [answers[i % 5].text[: len(said[i])] for i in range(load)]
            details = [each["usage"]["completion_tokens_details"] for each in found]
            assert not any(each["rejected_prediction_tokens"] for each in details)
            accepted = sum(each["accepted_prediction_tokens"] for each in details)
            share.setdefault(load, []).append(accepted / (40 * load))
        if adaptive == "false":
            assert len(set(share[1])) == 1, "alone it drafts as much as ever"
            assert max(share[12]) < 0.5 * share[1][0]
        metrics = engine.engine.metrics
        assert metrics.num_rows <= 16 * metrics.num_steps
        assert metrics.drafter_errors == 0


def test_O2_drafts_that_are_always_wrong_stop(answers):
    with rig.running(engine=rig.llm(f"{WRONG},adaptive=true")) as server:
        body = SETTINGS | {"max_tokens": 80}
        usages = [server.complete(prompt=prompt, **body)["usage"] for prompt in PROMPTS * 2]
    passes = sum(usage["speculation"]["target_passes"] for usage in usages)
    first = sum(sum(usage["speculation"]["drafted_by_position"][:1]) for usage in usages)
    assert 0 < first < passes / 2


def test_O3_lookup_in_a_long_prompt_is_bounded_and_pauses(monkeypatch):
    indexes: list[NgramIndex] = []
    begin, go_on = NgramIndex.__init__, NgramIndex.continuation

    def kept(self, *ranges):
        begin(self, *ranges)
        indexes.append(self)

    def wrong(self, match, count):
        return [(token + 1) % 200 + 3 for token in go_on(self, match, count)]

    monkeypatch.setattr(NgramIndex, "__init__", kept)
    monkeypatch.setattr(NgramIndex, "continuation", wrong)
    drafted = {}
    for patience in (4, 0):
        scheme = f"prompt-lookup:k=6,ngram_min=1,ngram_max=500,patience={patience}"
        engine = rig.llm(scheme)
        with rig.running(engine=engine) as server:
            body = {"prompt": "the cat and the hen " * 25, "max_tokens": 150, "ignore_eos": True}
            on = server.complete(**body, seed=2)
            off = server.complete(**body, seed=2, speculation={"enabled": False})
            assert on["choices"] == off["choices"]
            told = on["usage"]["speculation"]
            drafted[patience] = told["drafted_by_position"][0] / told["target_passes"]
    assert drafted[4] < 0.25
    assert drafted[0] > 0.6
    assert indexes
    assert all(0 < each.operations <= 80 * len(each.tokens) for each in indexes)
