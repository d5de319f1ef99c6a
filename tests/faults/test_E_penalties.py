"""Kind E of the faults seen in the field: penalties, bias, bans and min_tokens on draft rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foretell.sequence import FinishReason, SamplingParams
from tests import tiny
from tests.faults import rigs
from tests.faults.rigs import ALL, COPY

PROMPTS = [COPY, *tiny.prompts(2, seed=8)]
STRONG = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
]
_PLAIN: dict[str, list[list[int]]] = {}


def plain(params: SamplingParams) -> list[list[int]]:
    key = repr(params)
    if key not in _PLAIN:
        _PLAIN[key] = tiny.ids(rigs.plain(PROMPTS, params))
    return _PLAIN[key]


@pytest.mark.parametrize("scheme", ALL)
def test_E1_penalties_are_those_of_plain_decoding(scheme):
    """All settings side by side in one batch, each with prompts of its own."""
    prompts = [[2 + i, *p] for i in range(len(STRONG)) for p in PROMPTS]
    params = [tiny.greedy(max_tokens=128, **setting) for setting in STRONG for _ in PROMPTS]
    if "E1" not in _PLAIN:
        _PLAIN["E1"] = tiny.ids(rigs.plain(prompts, params))
        _PLAIN["E1 off"] = tiny.ids(rigs.plain(prompts, tiny.greedy(max_tokens=128)))
    rigs.script(prompts, _PLAIN["E1"])
    results = tiny.llm(scheme.format(k=6), kv_memory="32MiB").generate(prompts, params)
    assert tiny.ids(results) == _PLAIN["E1"]
    assert sum(result.stats.drafted for result in results) > 0
    for i, setting in enumerate(STRONG):
        part = slice(i * len(PROMPTS), (i + 1) * len(PROMPTS))
        assert _PLAIN["E1"][part] != _PLAIN["E1 off"][part], f"{setting} shows nowhere"


def test_E1_plus_and_minus_two_differ():
    for name in ("frequency_penalty", "presence_penalty"):
        assert plain(tiny.greedy(**{name: 2.0})) != plain(tiny.greedy(**{name: -2.0}))


@pytest.mark.parametrize("setting", STRONG[:4], ids=str)
def test_E1_counts_are_those_of_the_text_before_each_token(setting):
    """An independent replay: the target's own log-probabilities, less what the definition says."""
    params = tiny.greedy(max_tokens=64, logprobs=tiny.VOCAB, **setting)
    rigs.script(PROMPTS, plain(tiny.greedy(max_tokens=64, **setting)))
    for result in tiny.llm("tests.fakes:Mixed,k=6").generate(PROMPTS, params):
        assert result.stats.accepted > 0
        counts = np.zeros(tiny.VOCAB)
        for token, entry in zip(result.token_ids, result.logprobs, strict=True):
            logits = np.zeros(tiny.VOCAB)
            for other, value in entry.top:
                logits[other] = value
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            assert logits[token] >= logits.max() - 1e-4
            counts[token] += 1


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("scheme", ALL)
def test_E2_every_token_obeys_every_processor(scheme, rule):
    if rule != "coupled" and scheme not in (rigs.SELF[1], rigs.MIXED):
        pytest.skip("covered by the others")
    usual = [
        tiny.greedy(max_tokens=24),
        tiny.sampled(max_tokens=24),
        tiny.sampled(temperature=2.0, max_tokens=24),
    ]
    common = [t for answer in plain(usual[0]) for t in answer]
    often = max(set(common), key=common.count)
    cases: list[tuple[SamplingParams, set[int]]] = []
    for base in usual:
        rest = set(range(tiny.VOCAB)) - {often}
        cases += [
            (rigs.params(base, logit_bias={often: -100.0}), rest),
            (rigs.params(base, bad_token_ids=[often]), rest),
            (rigs.params(base, logit_bias={37: 100.0}), {37}),
            (rigs.params(base, allowed_token_ids=[4, 37, 50]), {4, 37, 50}),
        ]
    rigs.script(PROMPTS, plain(usual[0]))  # drafts that know nothing of the ban
    options = {"max_num_seqs": len(cases) * len(PROMPTS), "kv_memory": "32MiB"}
    engine = tiny.llm(f"{scheme.format(k=6)},verification={rule}", **options)
    answers = tiny.ids(
        engine.generate(
            [prompt for _ in cases for prompt in PROMPTS],
            [params for params, _ in cases for _ in PROMPTS],
        )
    )
    assert engine.engine.metrics.drafted > 0
    for i, (params, legal) in enumerate(cases):
        own = answers[i * len(PROMPTS) : (i + 1) * len(PROMPTS)]
        assert all(set(answer) <= legal for answer in own)
        if rule == "coupled":
            assert own == plain(params)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("scheme", ["draft-model:weights=int4,k=6", rigs.MIXED.format(k=6)])
def test_E2_min_p_holds_at_every_position(scheme, rule):
    params = tiny.sampled(temperature=2.0, min_p=0.9, logprobs=1)
    rigs.script(PROMPTS, plain(params))
    engine = tiny.llm(f"{scheme},verification={rule}")
    results = engine.generate(PROMPTS, params)
    assert sum(result.stats.accepted for result in results) > 0
    for result in results:
        for entry in result.logprobs:
            (_, best), chosen = entry.top[0], entry.logprob
            assert (chosen - best) / 2.0 >= np.log(0.9) - 1e-4


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("scheme", [*ALL, "tests.faults.rigs:EndEverywhere,k={k}"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_E3_a_model_that_always_wants_to_end_ends_after_exactly_min_tokens(scheme, k, temperature):
    base = SamplingParams(temperature=temperature, logit_bias={tiny.EOS: 100.0}, seed=3)
    free = plain(rigs.params(base, bad_token_ids=[tiny.EOS], max_tokens=40))
    rigs.script(PROMPTS, [[*answer] for answer in free], (tiny.EOS,))
    cases = list(itertools.product(zip(PROMPTS, free, strict=True), range(3 * k + 1)))
    engine = tiny.llm(scheme.format(k=k), max_num_seqs=len(cases))
    results = engine.generate(
        [prompt for (prompt, _), _ in cases], [rigs.params(base, min_tokens=m) for _, m in cases]
    )
    for ((_, answer), m), result in zip(cases, results, strict=True):
        assert result.token_ids == [*answer[:m], tiny.EOS]
        assert result.finish_reason == FinishReason.STOP
        rigs.check_counts(result)


@pytest.mark.parametrize("scheme", [rigs.SELF[0], rigs.MIXED])
def test_E3_stop_tokens_wait_for_min_tokens_too(scheme):
    """Token 20 wants to come everywhere and ends the answer; so does the text of id 20."""
    base = SamplingParams(temperature=0, logit_bias={20: 100.0}, max_tokens=20, ignore_eos=True)
    free = plain(rigs.params(base, bad_token_ids=[20]))
    rigs.script(PROMPTS, free)
    engine = rigs.spoken(scheme.format(k=4))
    for m in range(13):
        params = rigs.params(base, min_tokens=m, stop_token_ids=[20])
        for answer, result in zip(free, engine.generate(PROMPTS, params), strict=True):
            assert result.token_ids == [*answer[:m], 20]
        text = rigs.params(base, min_tokens=m, stop=[rigs.RANDOM_TEXT.decode([20])])
        for result in engine.generate(PROMPTS, text):  # text does not ban, it waits
            assert result.token_ids == [20] * (m + 1)
            assert result.finish_reason == FinishReason.STOP
