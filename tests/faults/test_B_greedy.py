"""Kind B of the faults seen in the field: greedy text must not depend on what is drafted."""

from __future__ import annotations

import random

import pytest
import torch

from foretell.engine.rows import lay_out
from foretell.engine.scheduler import Item
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.tree import from_lists
from tests import tiny
from tests.faults import rigs

STATEFUL = {
    "plain": tiny.greedy(max_tokens=24),
    "penalties": tiny.greedy(
        frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.2, max_tokens=24
    ),
    "min_tokens": tiny.greedy(
        ignore_eos=False, min_tokens=9, stop_token_ids=[13, 44, 50, 60], max_tokens=40
    ),
}
ONE_WORD = [[word] * count for word in (13, 44) for count in (16, 48, 200)]
_PLAIN: dict[str, list[list[int]]] = {}


def plain(name: str) -> list[list[int]]:
    if name not in _PLAIN:
        _PLAIN[name] = tiny.ids(rigs.plain(ONE_WORD, STATEFUL[name]))
    return _PLAIN[name]


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("scheme", [*rigs.ALL, "draft-model:weights=int4,k={k}"])
def test_B1_one_word_repeated(scheme, k, name):
    """Degenerate prompts, processors with a memory, and rows that get no draft now and then."""
    rigs.script(ONE_WORD, plain(name), (tiny.EOS,))
    engine = tiny.llm(scheme.format(k=k))
    results = engine.generate(ONE_WORD, STATEFUL[name])
    assert tiny.ids(results) == plain(name)
    assert sum(result.stats.drafted for result in results) > 0


def test_B1_prompts_are_what_they_should_be():
    """Their answers differ, some with each other and all with their settings."""
    assert len({tuple(answer) for answer in plain("plain")}) > 2
    assert plain("plain") != plain("penalties")
    assert any(len(answer) < 40 for answer in plain("min_tokens"))


def tree(kind: str, size: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and parents of one tree with ``size`` draft nodes, siblings all different."""
    tokens, parents = [0], [-1]
    for i in range(1, size + 1):
        parents.append({"chain": i - 1, "star": 0, "random": rng.randrange(i)}[kind])
        taken = {tokens[j] for j in range(1, i) if parents[j] == parents[i]}
        tokens.append(rng.choice([t for t in range(tiny.VOCAB) if t not in taken]))
    return tokens, parents


def forward(engine, sequence: Sequence, tokens: list[int], parents: list[int]) -> torch.Tensor:
    """Logits [nodes, V] of one tree behind a sequence whose KV is there but for the root."""
    runtime = engine.engine.runtime
    run = len(sequence.tokens) - sequence.num_computed
    rows, _ = lay_out([Item(sequence, run)], from_lists([tokens], [parents]), lambda s: None)
    with torch.inference_mode():
        return runtime.forward_target(rows).logits


@pytest.mark.parametrize("weights", ["f32", "int8"])
@pytest.mark.parametrize("kind", ["chain", "star", "random"])
def test_B2_tree_rows_are_those_of_a_plain_forward_of_each_path(kind, weights):
    rng = random.Random(kind)
    engine = tiny.llm(weights=weights)
    for size in (1, 2, 3, 7, 16, 40, 63):
        prompt = [rng.randrange(2, tiny.VOCAB) for _ in range(rng.randrange(2, 30))]
        tokens, parents = tree(kind, size, rng)
        tokens[0] = prompt[-1]
        sequence = Sequence("tree", prompt, SamplingParams(), 0, slot=0)
        sequence.pages = list(range(40))  # shuffled pages would do as well: cells go through them
        rng.shuffle(sequence.pages)
        engine.engine.runtime.set_pages(0, sequence.pages)
        got = forward(engine, sequence, tokens, parents)  # [1 + size, V]
        for node in range(size + 1):
            path, at = [], node
            while at > 0:
                path.append(tokens[at])
                at = parents[at]
            alone = Sequence("path", prompt + path[::-1], SamplingParams(), 0, slot=0)
            alone.pages = sequence.pages
            (expected,) = forward(engine, alone, [alone.tokens[-1]], [-1])
            assert (got[node] - expected).abs().max() <= 1e-4
            assert torch.equal(got[node], expected), "not the same bits"


@pytest.mark.parametrize(
    "scheme",
    [
        *[f"tests.fakes:Noise,k={k},seed={seed}" for seed in range(4) for k in (1, 7, 63)],
        *[f"tests.fakes:Bushy,k={k},seed={k}" for k in (2, 5, 16, 40, 63)],
        *[f"tests.faults.rigs:Star,k={k}" for k in (1, 8, 63)],
        *[f"prompt-lookup:k={k},branches={b},ngram_min=1" for k, b in ((2, 2), (12, 3), (40, 8))],
        *[f"draft-model:weights={w},k={k}" for w in ("target", "int4") for k in (2, 5, 30)],
    ],
)
def test_B2_no_topology_or_budget_changes_the_answer(scheme):
    prompts = [*tiny.prompts(3, seed=11), rigs.COPY]
    if "B2" not in _PLAIN:
        _PLAIN["B2"] = tiny.ids(rigs.plain(prompts, tiny.greedy()))
    rigs.script(prompts, _PLAIN["B2"])
    engine = tiny.llm(scheme)
    assert tiny.ids(engine.generate(prompts, tiny.greedy())) == _PLAIN["B2"]


@pytest.mark.parametrize("weights", ["f32", "int8", "bf16", "int4"])
def test_B3_no_prompt_differs_in_any_weight_format(weights):
    """Elsewhere ties may fall differently; here every format is exact, so the share of prompts
    that differ is 0 and so is the difference of every log-probability."""
    prompts = tiny.prompts(16, seed=21)
    params = tiny.greedy(max_tokens=24, logprobs=2)
    expected = rigs.plain(prompts, params, weights=weights)
    rigs.script(prompts, tiny.ids(expected))
    engine = tiny.llm("tests.fakes:Bushy,k=20", weights)
    results = engine.generate(prompts, params)
    gaps = []
    for got, want in zip(results, expected, strict=True):
        for place, (a, b) in enumerate(zip(got.token_ids, want.token_ids, strict=True)):
            if a != b:
                (_, first), (_, second) = want.logprobs[place].top
                gaps.append(first - second)
                break
    assert not gaps, f"{len(gaps)} of {len(prompts)} differ; top-2 gaps there: {gaps}"
    assert [r.logprobs for r in results] == [r.logprobs for r in expected]
    assert sum(result.stats.accepted for result in results) > 0
