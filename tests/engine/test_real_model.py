"""Same text on a real model, where near-ties are common: the default one, over 36 prompts."""

import json
from functools import cache

import pytest

from foretell.bench.workloads import default_workload
from foretell.llm import LLM
from foretell.models.loader import LoadedModel, load
from foretell.sequence import SamplingParams
from tests.tiny import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCHEMES = [
    "prompt-lookup:k=8,adaptive=false",
    "prompt-lookup:k=12,branches=3",
    "draft-model:weights=int4,k=4",
]
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=48),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=48),
    "penalties": SamplingParams(
        temperature=1.0, seed=5, frequency_penalty=0.4, repetition_penalty=1.1, max_tokens=48
    ),
}


@cache
def target(weights: str) -> LoadedModel:
    return load("smollm2", weights)


@cache
def prompts() -> list[list[int]]:
    engine = LLM(target("int8"))
    found = [
        engine.chat_prompt([{"role": "user", "content": conversation.turns[0]}])
        for conversation in default_workload()
    ][:36]
    assert len(found) >= 32
    return found


@cache
def plain(weights: str, name: str) -> list[list[int]]:
    """One prompt at a time, nothing shared."""
    engine = LLM(target(weights), weights=weights, max_num_seqs=1, prefix_caching=False)
    return ids(engine.generate(prompts(), SETTINGS[name]))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_same_text(weights, scheme, name):
    expected = plain(weights, name)
    engine = LLM(
        target(weights),
        speculation=scheme,
        weights=weights,
        max_num_seqs=8,
        max_num_batched_tokens=96,  # prompts come in chunks, beside answers of others
        max_model_len=2048,
        kv_memory="512MiB",
    )
    cold = engine.generate(prompts(), SETTINGS[name])
    assert ids(cold) == expected
    assert engine.engine.metrics.drafter_errors == 0
    assert sum(result.stats.accepted for result in cold) > 0
    warm = engine.generate(prompts()[::4], SETTINGS[name])
    assert ids(warm) == expected[::4]
    assert all(result.stats.num_cached_tokens for result in warm)


@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_same_text_alone(weights):
    engine = LLM(
        target(weights), speculation="draft-model:weights=int4,k=5", weights=weights, max_num_seqs=1
    )
    got = engine.generate(prompts()[::3], SETTINGS["greedy"])
    assert ids(got) == plain(weights, "greedy")[::3]


def test_a_target_drafting_for_itself_is_always_accepted():
    engine = LLM(target("int8"), speculation="draft-model:weights=target,k=5,adaptive=false")
    for name in SETTINGS:
        if name == "penalties":  # drafts know no penalties
            continue
        results = engine.generate(prompts()[:8], SETTINGS[name])
        assert ids(results) == plain("int8", name)[:8]
        assert [r.stats.accepted for r in results] == [r.stats.drafted for r in results]


def test_temperature_one_is_accepted_nearly_as_often_as_any_rule_could():
    """Coupled drafts at temperature 1: design.md measured 0.618 of at most 0.657."""
    engine = LLM(target("int8"), speculation="draft-model:weights=int4,k=1,adaptive=false")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=64, ignore_eos=True)
    results = engine.generate(prompts()[::2], params)
    drafted = sum(r.stats.drafted for r in results)
    accepted = sum(r.stats.accepted for r in results)
    assert drafted > 300
    assert accepted / drafted > 0.5


def test_the_demo_gets_what_it_asks_for():
    """Its prompt is an edit of a JSON object: two values change, nothing else does."""
    from foretell.demo import _PROMPT

    llm = LLM("smollm2", speculation="prompt-lookup:k=8,adaptive=false")
    (result,) = llm.chat(
        [{"role": "user", "content": _PROMPT}], SamplingParams(temperature=0, max_tokens=192)
    )
    given, answer = (json.loads(text[text.index("{") : text.index("}") + 1])
                     for text in (_PROMPT, result.text))  # fmt: skip
    assert answer == given | {"price": 59.5, "stock": 7}
