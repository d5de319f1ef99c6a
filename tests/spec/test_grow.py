"""Chains grown over a scripted draft; budgets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretell.sequence import SamplingParams
from foretell.spec.budget import FixedBudget
from foretell.spec.grow import argmax, coupled, grow_chain, sampled
from foretell.spec.seats import limit

NAN = float("nan")


def counting(vocab: int, calls: list[tuple[list[int], list[int], int]] | None = None):
    """A draft that always says: one more than the last token."""

    def step(sequences: list[int], tokens: list[int], depth: int) -> Tensor:
        if calls is not None:
            calls.append((list(sequences), list(tokens), depth))
        return says([token + 1 for token in tokens], vocab)

    return step


def says(tokens: list[int], vocab: int) -> Tensor:
    return 9.0 * torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


def test_k_tokens_cost_k_minus_one_steps_and_each_sequence_has_its_budget():
    calls: list[tuple[list[int], list[int], int]] = []
    tree = grow_chain([0, 3, 6], says([1, 4, 7], 12), [3, 0, 2], counting(12, calls), argmax)
    tree.check(12)
    assert tree.num_drafted == [3, 0, 2]
    assert tree.tokens[0].tolist() == [0, 1, 2, 3]
    assert tree.tokens[2, :3].tolist() == [6, 7, 8]
    assert calls == [([0, 2], [1, 7], 1), ([0], [2], 2)]
    assert tree.probs is None


def test_no_budget_no_step():
    tree = grow_chain([5], says([1], 12), [0], counting(12), argmax)
    assert tree.tokens.tolist() == [[5]]


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("pick", ["argmax", "coupled", "sampled"])
def test_a_broken_row_ends_that_draft_only(pick: str, bad: float):
    def step(sequences: list[int], tokens: list[int], depth: int) -> Tensor:
        logits = says([token + 1 for token in tokens], 12)
        for row, b in enumerate(sequences):
            if b == 1 and depth == 2:
                logits[row] = bad
        return logits

    params = [SamplingParams(temperature=0)] * 3
    picks = {
        "argmax": argmax,
        "coupled": coupled(params, [1] * 3, [0] * 3, lambda s, p: torch.zeros(len(s), 12)),
        "sampled": sampled(params, lambda rows, depth: [0.5] * len(rows)),
    }
    first = says([1, 2, 3], 12)
    first[2] = bad
    tree = grow_chain([0, 1, 2], first, [4, 4, 4], step, picks[pick])
    tree.check(12)
    assert tree.num_drafted == [4, 2, 0]
    assert tree.tokens[0].tolist() == [0, 1, 2, 3, 4]
    if tree.probs is not None:
        assert tree.probs.isfinite().all()
        assert tree.probs[1].sum(-1).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_sampled_keeps_exactly_the_law_it_drew_from():
    params = [SamplingParams(temperature=0.5, top_k=2), SamplingParams(temperature=0)]
    first = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    counts = torch.zeros(3)
    for i in range(200):
        pick = sampled(params, lambda rows, depth, i=i: [(i + 0.5) / 200] * len(rows))
        tree = grow_chain([0, 0], first, [1, 1], counting(3), pick)
        assert tree.probs is not None
        counts[tree.tokens[0, 1]] += 1
        assert tree.tokens[1, 1] == 2
        assert tree.probs[1, 0].tolist() == [0.0, 0.0, 1.0]
    expected = torch.softmax(torch.tensor([-torch.inf, 4.0, 6.0]), 0)
    assert torch.allclose(tree.probs[0, 0], expected)
    assert (counts / 200 - expected).abs().max() < 0.006


def test_coupled_uses_the_noise_of_the_tokens_own_position():
    asked: list[tuple[list[int], list[int]]] = []

    def noise(seeds: list[int], positions: list[int]) -> Tensor:
        asked.append((seeds, positions))
        return 100.0 * torch.nn.functional.one_hot(torch.tensor(positions), 30).float()

    params = [SamplingParams(), SamplingParams(temperature=0)]
    pick = coupled(params, [7, 8], [10, 20], noise)
    tree = grow_chain([0, 0], says([1, 1], 25), [2, 2], counting(25), pick)
    assert asked == [([7], [11]), ([7], [12])]
    assert tree.tokens.tolist() == [[0, 11, 12], [0, 1, 2]]


def test_a_padded_draft_vocabulary_is_cut():
    first = says([11], 12)
    first[0, 4] = 5.0
    tree = grow_chain([0], first, [1], counting(12), argmax, vocab_size=10)
    assert tree.tokens.tolist() == [[0, 4]]
    pick = sampled([SamplingParams()], lambda rows, depth: [0.3])
    wide = grow_chain([0], says([1], 4), [2], counting(4), pick, vocab_size=6)
    assert wide.probs is not None
    assert wide.probs.shape == (1, 3, 6)
    assert wide.probs[0, :2, 4:].eq(0).all()


def test_limit_leaves_room_for_the_targets_own_token():
    assert limit(5, 63, 100, 100) == (5, 5)
    assert limit(5, 3, 100, 100) == (3, 3)
    assert limit(5, 63, 2, 100) == (5, 2)
    assert limit(5, 63, 100, 4) == (5, 3)
    assert limit(5, 63, 100, 1) == (0, 0)
    assert limit(5, 63, -1, 100) == (0, 0)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(-2, 60))
def test_shares_are_fair(limits: list[int], rows: int):
    given = FixedBudget().share(limits, rows, prefills=False)
    assert all(0 <= g <= most for g, most in zip(given, limits, strict=True))
    assert sum(given) == min(sum(limits), max(0, rows))
    cut = [g for g, most in zip(given, limits, strict=True) if g < most]
    assert not cut or max(given) - min(cut) <= 1


def test_nobody_drafts_while_a_prompt_is_prefilled():
    assert FixedBudget().share([5, 5], 100, prefills=True) == [0, 0]
