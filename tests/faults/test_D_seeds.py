"""Kind D of the faults seen in the field: a request's seed and nothing else decides its text."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.faults import rigs

PROMPT = [5, 19, 33, 47, 8, 19, 33]
MINE = tiny.sampled(seed=7, max_tokens=30)
SCHEMES = [
    None,
    "prompt-lookup:k=6,ngram_min=1",
    "draft-model:weights=int4,k=4",
    "draft-model:weights=target,k=4",
    "tests.fakes:Noise,k=12",
    "tests.fakes:Bushy,k=12",
]


@pytest.fixture(scope="module")
def alone() -> list[int]:
    (result,) = rigs.plain([PROMPT], MINE)
    return result.token_ids


def others(count: int, seed: int, **changes):
    prompts = tiny.prompts(count, seed=seed)
    return prompts, [
        tiny.sampled(seed=i, temperature=0.5 + i % 3, max_tokens=3 + i % 20, **changes)
        for i in range(count)
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_D1_seed_decides_alone_or_in_a_batch_on_a_cold_or_a_warm_engine(scheme, alone):
    rigs.script([PROMPT], [alone])
    engine = tiny.llm(scheme)
    assert tiny.ids(engine.generate(PROMPT, MINE)) == [alone]  # alone, cold
    assert tiny.ids(engine.generate(PROMPT, MINE)) == [alone]  # again, prefix cache warm
    for place in (0, 3, 7):  # in a batch of 8
        prompts, params = others(7, seed=place)
        prompts.insert(place, PROMPT)
        params.insert(place, MINE)
        assert engine.generate(prompts, params)[place].token_ids == alone
    for _ in engine.generate(*others(100, seed=5)):  # after 100 other requests
        pass
    assert tiny.ids(engine.generate(PROMPT, MINE)) == [alone]
    streamed = [t for delta in engine.stream(PROMPT, MINE) for t in delta.token_ids]
    assert streamed == alone
    assert tiny.ids(engine.generate(PROMPT, MINE, speculate=False)) == [alone]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_D1_after_a_preemption(scheme, alone):
    """Pages for about three of the eight: the rest is thrown out and comes back."""
    prompts, params = others(7, seed=1)
    prompts.append(PROMPT)
    params = [rigs.params(p, max_tokens=30) for p in params] + [MINE]
    expected = tiny.ids(rigs.plain(prompts, params))
    rigs.script(prompts, expected)
    memory = "88KiB" if scheme and "draft-model" in scheme else "44KiB"  # 44 pages
    engine = tiny.llm(scheme, max_model_len=80, kv_memory=memory, max_num_seqs=8)
    results = engine.generate(prompts, params)
    assert tiny.ids(results) == expected
    assert results[-1].token_ids == alone
    assert engine.engine.scheduler.num_preemptions > 0
    assert results[-1].stats.num_preemptions > 0, "the youngest was never preempted"
    tiny.check_idle(engine)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_D1_differing_seeds_give_differing_answers(scheme):
    engine = tiny.llm(scheme)
    params = [tiny.sampled(seed=seed, max_tokens=20) for seed in range(32)]
    answers = tiny.ids(engine.generate([PROMPT] * 32, params))
    assert len({tuple(answer) for answer in answers}) == 32
    assert answers == tiny.ids(engine.generate([PROMPT] * 32, params))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_D1_other_rules_repeat_themselves_too(rule):
    """Their text depends on the drafts, but not on what the engine did before."""
    engine = tiny.llm(f"draft-model:weights=int4,k=4,verification={rule}")
    first = tiny.ids(engine.generate(PROMPT, MINE))
    engine.generate(*others(20, seed=3))
    assert tiny.ids(engine.generate(PROMPT, MINE)) == first
    other = tiny.ids(engine.generate(PROMPT, tiny.sampled(seed=8, max_tokens=30)))
    assert other != first
