"""N: rows of logits that are not numbers end one request with an error, and never the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretell.llm import LLM
from foretell.sequence import FinishReason
from tests import tiny
from tests.fakes import Scripted

NAN, INF = float("nan"), float("inf")
PROMPTS = tiny.prompts(4, seed=11)
VICTIM = 1


@pytest.fixture(params=["greedy", "sampled"])
def case(request, monkeypatch):
    """Parameters and plain answers, told to scripted drafters too."""
    params = {"greedy": tiny.greedy(max_tokens=24), "sampled": tiny.sampled(max_tokens=24)}
    plain = tiny.ids(tiny.llm(max_num_seqs=1).generate(PROMPTS, params[request.param]))
    answers = {tuple(p): a for p, a in zip(PROMPTS, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    return params[request.param], plain


class Spoiler:
    """The target, whose logits behind one place of the victim's text are spoiled. Which rows
    those are is read from the step's layout: the row of that position with that token before it."""

    def __init__(self, llm: LLM, position: int, value: float, all_rows: bool = True) -> None:
        self.runtime, self.position, self.value = llm.engine.runtime, position, value
        self.hits = 0
        self.forward = self.runtime.forward_target
        self.engine, self.all_rows = llm.engine, all_rows
        self.runtime.forward_target = self

    def __call__(self, rows):
        output = self.forward(rows)
        for o, row in enumerate(rows.outputs):
            sequence = next(s for s in self.engine.scheduler.running if s.slot == rows.slots[row])
            if sequence.tokens[: sequence.num_prompt] != PROMPTS[VICTIM]:
                continue
            if rows.positions[row] == self.position:
                output.logits[o, :: 1 if self.all_rows else 3] = self.value
                self.hits += 1
        return output


SCHEMES = [
    None,
    "tests.fakes:Oracle,k=5",
    "tests.fakes:Mixed,k=5",
    "tests.fakes:Bushy,k=20",
    "draft-model:weights=target,k=4",
]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_N1_a_bad_target_row_fails_its_request_only(scheme, value, case):
    """Wherever in a block the row falls: what came before it is plain decoding's answer."""
    params, plain = case
    for place in range(8):
        llm = tiny.llm(scheme)
        spoiler = Spoiler(llm, len(PROMPTS[VICTIM]) - 1 + place, value)
        results = llm.generate(PROMPTS, params)
        assert spoiler.hits > 0
        for i, (result, answer) in enumerate(zip(results, plain, strict=True)):
            if i == VICTIM:
                assert result.finish_reason == FinishReason.ERROR
                assert result.error
                assert ("no token is left" if value == -INF else "not finite") in result.error
                assert result.token_ids == answer[:place]
            else:
                assert result.finish_reason == FinishReason.LENGTH
                assert result.token_ids == answer
        assert llm.engine.metrics.num_failed == 1
        tiny.check_idle(llm)
        llm.engine.runtime.forward_target = spoiler.forward
        assert tiny.ids(llm.generate(PROMPTS, params)) == plain, "the next requests are unharmed"


@pytest.mark.parametrize("value", [NAN, INF])
def test_N1_some_bad_entries_are_enough(value, case):
    params, plain = case
    llm = tiny.llm("tests.fakes:Oracle,k=5")
    Spoiler(llm, len(PROMPTS[VICTIM]) + 3, value, all_rows=False)
    results = llm.generate(PROMPTS, params)
    assert results[VICTIM].finish_reason == FinishReason.ERROR
    assert [r.token_ids for i, r in enumerate(results) if i != VICTIM] == [
        a for i, a in enumerate(plain) if i != VICTIM
    ]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_N1_rejection_rules(rule, value, case):
    params, plain = case
    llm = tiny.llm(f"draft-model:weights=int4,k=4,verification={rule}")
    spoiler = Spoiler(llm, len(PROMPTS[VICTIM]) + 4, value)
    results = llm.generate(PROMPTS, params)
    assert spoiler.hits > 0
    for i, result in enumerate(results):
        wanted = FinishReason.ERROR if i == VICTIM else FinishReason.LENGTH
        assert result.finish_reason == wanted
        assert all(0 <= token < tiny.VOCAB for token in result.token_ids)
        if params.greedy:
            assert result.token_ids == (plain[i][:5] if i == VICTIM else plain[i])


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_N1_a_bad_row_behind_the_end_never_was(scheme, case):
    """The rows behind a stop token are computed with the block and must not matter."""
    params, plain = case
    answer = plain[VICTIM]
    for place in range(1, 9):
        stop = answer[place]
        first = answer.index(stop)
        stopping = replace(params, stop_token_ids=[stop])
        llm = tiny.llm(scheme)
        Spoiler(llm, len(PROMPTS[VICTIM]) + first, NAN)  # the row of the stop token itself
        (result,) = llm.generate([PROMPTS[VICTIM]], stopping)
        assert (result.finish_reason, result.error) == (FinishReason.STOP, None)
        assert result.token_ids == answer[: first + 1]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_N1_bad_draft_rows_cost_drafts_only(rule, value, case):
    params, plain = case
    if rule == "rejection" and not params.greedy:
        pytest.skip("rejection keeps the distribution, not the text of a seed")
    llm = tiny.llm(f"draft-model:weights=target,k=4,verification={rule}")
    inner, calls = llm.engine.runtime.forward, [0, 0]

    def forward(model, rows):
        logits = inner(model, rows)
        calls[0] += 1
        if len(logits) and calls[0] % 3 == 0:
            logits[calls[0] % len(logits)] = value
            calls[1] += 1
        return logits

    llm.engine.runtime.forward = forward
    results = llm.generate(PROMPTS, params)
    assert tiny.ids(results) == plain
    assert calls[1] > 3
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert sum(r.stats.accepted for r in results) > 0
    assert all(r.stats.accepted == r.stats.drafted for r in results), "no draft from a bad row"
    llm.engine.runtime.forward = inner
    again = llm.generate(PROMPTS, params)
    assert tiny.ids(again) == plain
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in again), "drafting is back"


def test_N1_values_in_kv_that_are_not_numbers_stay_with_their_request(case):
    """A model that breaks down on one text leaves no NaN for whoever gets its pages."""
    params, plain = case
    llm = tiny.llm("tests.fakes:Bushy,k=20", max_model_len=80, kv_memory="64KiB", max_num_seqs=2)
    model = llm.target.model
    inner = model.run

    def run(tokens, attention, layout, kv, outputs, taps=()):
        logits, features = inner(tokens, attention, layout, kv, outputs, taps)
        if broken:
            for cache in (cache for layer in kv for cache in layer):
                pages, offsets = layout.cells // 4, layout.cells % 4
                cache[pages.long(), :, offsets.long()] = torch.nan
            logits = logits * torch.nan
        return logits, features

    broken, model.run = True, run
    try:
        bad = llm.generate(PROMPTS, params)
        assert all(r.finish_reason == FinishReason.ERROR and not r.token_ids for r in bad)
        broken = False
        assert tiny.ids(llm.generate(PROMPTS, params)) == plain
    finally:
        model.run = inner
