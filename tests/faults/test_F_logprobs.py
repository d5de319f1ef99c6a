"""Kind F of the faults seen in the field: log-probabilities and other fields of each token."""

from __future__ import annotations

import dataclasses
import math

import pytest

from foretell.sequence import SamplingParams
from tests import tiny
from tests.faults import rigs
from tests.faults.rigs import ALL

PROMPTS = [*tiny.prompts(3, seed=6), rigs.COPY]
_PLAIN: dict[str, list] = {}


def plain(params: SamplingParams):
    if (key := repr(params)) not in _PLAIN:
        _PLAIN[key] = rigs.plain(PROMPTS, params)
    return _PLAIN[key]


@pytest.mark.parametrize("settings", [tiny.greedy(), tiny.sampled()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheme", ALL)
def test_F1_logprobs_are_those_of_a_forward_over_the_answer(scheme, settings):
    params = rigs.params(settings, logprobs=5)
    rigs.script(PROMPTS, tiny.ids(plain(params)))
    results = tiny.llm(scheme.format(k=6)).generate(PROMPTS, params)
    rigs.check_same(results, plain(params))
    for prompt, result in zip(PROMPTS, results, strict=True):
        text = prompt + result.token_ids
        ask = tiny.greedy(prompt_logprobs=tiny.VOCAB, max_tokens=1)
        (forced,) = tiny.llm(prefix_caching=False).generate([text], ask)
        for entry, whole in zip(
            result.logprobs, forced.prompt_logprobs[len(prompt) :], strict=True
        ):
            assert abs(entry.logprob - whole.logprob) <= 1e-4
            assert entry.top == whole.top[:5]
            assert abs(sum(math.exp(v) for _, v in whole.top) - 1) < 1e-4
            assert entry.logprob == dict(whole.top)[entry.token_id]
        assert all(entry.logprob < 0 for entry in result.logprobs)
        assert len({entry.logprob for entry in result.logprobs}) > 1


def test_F1_they_are_the_models_own_before_any_setting_acts():
    params = tiny.greedy(logprobs=2, logit_bias={3: 100.0}, max_tokens=6)
    for result in tiny.llm(rigs.LOOKUP.format(k=4)).generate(PROMPTS, params):
        assert result.token_ids == [3] * 6
        assert all(entry.logprob < -1e-3 for entry in result.logprobs)


@pytest.mark.parametrize("scheme", ALL)
def test_F2_off_none_one_or_all_alternatives_in_one_batch(scheme):
    counts = [None, 0, 1, tiny.VOCAB]
    rigs.script(PROMPTS, tiny.ids(plain(tiny.greedy())))
    engine = tiny.llm(scheme.format(k=5))
    params = [tiny.greedy(logprobs=count) for count in counts]
    batch = engine.generate(PROMPTS, params)
    for prompt, param, count, result in zip(PROMPTS, params, counts, batch, strict=True):
        *_, last = engine.stream(prompt, param)
        for answer in (result, last.result):
            rigs.check_counts(answer)
            if count is None:
                assert answer.logprobs is None
                continue
            assert len(answer.logprobs) == len(answer.token_ids) == 24
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
                assert entry.token_id == token
                assert len(entry.top) == count
                assert not count or entry.top[0][1] >= entry.logprob


@pytest.mark.parametrize("scheme", [rigs.MIXED, rigs.HOSTILE, *rigs.SELF, rigs.LOOKUP])
@pytest.mark.parametrize("settings", [tiny.greedy(), tiny.sampled()], ids=["greedy", "sampled"])
def test_F3_eight_at_once_each_with_its_own_values(scheme, settings):
    prompts = tiny.prompts(8, seed=30)
    params = [
        rigs.params(settings, logprobs=i % 4, max_tokens=12 + 3 * i, seed=i) for i in range(8)
    ]
    solo = rigs.plain(prompts, params)
    rigs.script(prompts, tiny.ids(solo))
    results = tiny.llm(scheme.format(k=5)).generate(prompts, params)
    rigs.check_same(results, solo)
    assert [len(result.logprobs) for result in results] == [12 + 3 * i for i in range(8)]
    assert sum(result.stats.drafted for result in results) > 0


OTHER_VALUES = {
    "temperature": 0.7,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.2,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.3,
    "logit_bias": {4: 2.0},
    "bad_token_ids": [9],
    "allowed_token_ids": [3, 4, 5, 6],
    "min_tokens": 5,
    "max_tokens": 9,
    "stop": ["th"],
    "stop_token_ids": [12],
    "ignore_eos": True,
    "seed": 99,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "n": 3,
}
ILLEGAL = {
    "temperature": -1.0,
    "top_k": -1,
    "top_p": 0.0,
    "min_p": 2.0,
    "presence_penalty": 3.0,
    "frequency_penalty": -3.0,
    "repetition_penalty": 0.0,
    "logit_bias": {tiny.VOCAB: 1.0},
    "bad_token_ids": [-1],
    "allowed_token_ids": [tiny.VOCAB + 3],
    "min_tokens": 1000,
    "max_tokens": 0,
    "stop": [""],
    "stop_token_ids": [tiny.VOCAB],
    "seed": 2**70,
    "logprobs": tiny.VOCAB + 1,
    "prompt_logprobs": -1,
    "n": 0,
}
METHODS = [
    f"{method},verification={rule}"
    for method in ("prompt-lookup:k=4,ngram_min=1", "draft-model:weights=int4,k=3")
    for rule in ("coupled", "rejection", "block", "typical", "threshold")
]


def test_F4_every_field_has_a_case():
    # Grammars need a tokenizer that these rigs lack: test_G_grammars walks them by scheme.
    fields = {field.name for field in dataclasses.fields(SamplingParams)} - {"grammar"}
    assert set(OTHER_VALUES) == fields
    assert set(ILLEGAL) == fields - {"ignore_eos"}


@pytest.mark.parametrize("scheme", METHODS)
def test_F4_every_field_works_with_every_method_or_is_refused_by_name(scheme):
    engine = rigs.spoken(scheme)
    healthy = tiny.greedy(max_tokens=4)
    (fine,) = engine.generate([rigs.COPY], healthy)
    base = tiny.sampled(max_tokens=10, ignore_eos=False)
    for name, value in OTHER_VALUES.items():
        params = rigs.params(base, **{name: value})
        results = engine.generate([rigs.COPY], params)
        assert len(results) == params.n
        assert all(result.error is None and result.token_ids for result in results), name
        if "coupled" in scheme:
            if name not in _PLAIN:
                _PLAIN[name] = rigs.plain([rigs.COPY], params, rigs.spoken)
            expected = _PLAIN[name]
            assert [rigs.view(r) for r in results] == [rigs.view(r) for r in expected], name
            assert [r.prompt_logprobs for r in results] == [r.prompt_logprobs for r in expected]
        assert engine.generate([rigs.COPY], healthy)[0].token_ids == fine.token_ids
    for name, value in ILLEGAL.items():
        with pytest.raises(ValueError, match=name):
            engine.generate([[4, 5], rigs.COPY], rigs.params(base, **{name: value}))
        assert not engine.engine.has_work, "something was queued"
        assert engine.generate([rigs.COPY], healthy)[0].token_ids == fine.token_ids
    tiny.check_idle(engine)


def test_F4_stop_strings_without_a_tokenizer_are_refused():
    engine = tiny.llm(rigs.LOOKUP.format(k=4))
    with pytest.raises(ValueError, match="stop"):
        engine.generate([rigs.COPY], tiny.greedy(stop=["x"]))
    assert not engine.engine.has_work
    assert len(engine.generate([rigs.COPY], tiny.greedy())[0].token_ids) == 24
