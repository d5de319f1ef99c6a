"""Trees from a draft model: against a brute-force tree over clean rebuilds, and their KV."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from foretell.config import SpeculationConfig
from foretell.drafters.draft_model import DraftModel
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask
from foretell.spec.tree import TokenTree, children, depths, path_to
from tests.drafters.tiny import VOCAB, MemoryRuntime, advance, ask, commit, sequence

TREES = {
    "eagle2": {"depth": "4", "topk": "3", "nodes": "12"},
    "wide": {"depth": "3", "topk": "8", "nodes": "40"},
    "eagle": {"tree": "eagle"},
    "medusa": {"tree": "medusa"},
}


def build(**options: str) -> DraftModel:
    return DraftModel(SpeculationConfig(method="draft-model", options=options), MemoryRuntime())


def says(tokens: list[int]) -> Tensor:
    """The draft's logits after a text, from a drafter that sees it for the first time."""
    drafter = build()
    copy = sequence(tokens)
    commit(drafter, (copy, len(tokens)))
    return drafter._carry[0]


def check(tree: TokenTree, b: int, text: Sequence, temperature: float) -> None:
    """Every node's children are the best after exactly its own path."""
    noise = MemoryRuntime().sampler_noise
    tokens, parents = tree.lists[b]
    for node, kids in enumerate(children(parents)):
        path = [tokens[n] for n in path_to(parents, node)]
        score = says([*text.tokens, *path])
        if temperature:
            score = score / temperature + noise([text.seed], [len(text.tokens) + len(path)])[0]
        best = score.argsort(descending=True).tolist()
        assert [tokens[kid] for kid in kids] == best[: len(kids)]


@pytest.mark.parametrize("temperature", [0.0, 6.0])
@pytest.mark.parametrize("name", TREES)
def test_trees_and_kv_equal_a_clean_rebuild(name: str, temperature: float) -> None:
    rng = random.Random(1)
    drafter = build(**TREES[name])
    texts = [sequence([3, 1, 4, 1, 5], 2, 7, temperature), sequence([9, 2], 0, 8, temperature)]
    commit(drafter, *[(text, len(text.tokens)) for text in texts])
    for turn in range(4):
        budgets = [drafter.needs.nodes or 0, (5, 0, 20, 1)[turn]]
        tree = drafter.propose(Ask(texts, budgets))
        tree.check(VOCAB)
        assert tree.num_drafted == [min(b, drafter.shape.num_nodes) for b in budgets]
        grown: list[tuple[Sequence, list[int]]] = []
        for b, text in enumerate(texts):
            check(tree, b, text, temperature)
            tokens, parents = tree.lists[b]
            path = path_to(parents, rng.randrange(len(tokens)))  # accepted, wherever it lies
            grown.append((text, [*(tokens[n] for n in path), rng.randrange(VOCAB)]))
        advance(drafter, grown)
        for text in texts:
            clean = build()
            commit(clean, (sequence(text.tokens), len(text.tokens)))
            count = len(text.tokens)
            mine, theirs = drafter.runtime.kv[text.slot, :, :count], clean.runtime.kv[0, :, :count]
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_limit_of_depth_is_none_of_nodes() -> None:
    """A controller asks for so many nodes and, apart from that, for so many levels."""
    drafter, text = build(**TREES["eagle2"]), sequence([3, 1, 4], 0)
    commit(drafter, (text, 3))
    for depth, nodes in ((4, 12), (2, 12), (1, 3)):
        tree = drafter.propose(Ask([text], [12], depths=[depth]))
        assert tree.num_drafted == [nodes]
        assert max(depths(tree.lists[0][1])) == depth


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("budget", [1, 2, 7, 63])
def test_cells_stay_within_what_the_engine_reserves(name: str, budget: int) -> None:
    """Root, ``budget`` nodes and one cell more: the draft writes no further."""
    drafter = build(**TREES[name])
    text = sequence([1, 2, 3], 1)
    commit(drafter, (text, 3))
    drafter.runtime.log.clear()
    drafter.propose(ask([text], budget))
    for rows in drafter.runtime.log:
        assert min(rows.cells) > 2
        assert max(rows.cells) <= 2 + budget
        assert rows.prefix == [3] * len(rows)
        assert rows.base == [2] * len(rows)
        assert set(rows.slots) == {1}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_costs_a_pass_for_each_level(name: str) -> None:
    drafter = build(**TREES[name])
    text = sequence([1, 2, 3])
    commit(drafter, (text, 3))
    before = len(drafter.runtime.log)
    tree = drafter.propose(ask([text], 63))
    depth = max(len(path_to(tree.lists[0][1], n)) for n in range(tree.num_drafted[0]))
    assert (
        len(drafter.runtime.log) - before == {"eagle2": 3, "wide": 2, "eagle": 4, "medusa": 3}[name]
    )
    advance(drafter, [(text, [5] * depth)])
    assert [len(rows.outputs) for rows in drafter.runtime.log[-1:]] == [1]


@pytest.mark.parametrize("name", TREES)
def test_drawn_trees_carry_the_law_of_every_node(name: str) -> None:
    drafter = build(**TREES[name])
    text = sequence([1, 2, 3], temperature=6.0)
    commit(drafter, (text, 3))
    tree = drafter.propose(ask([text], 63, sample=True))
    assert tree.probs is not None
    tokens, parents = tree.lists[0]
    for node, kids in enumerate(children(parents)):
        path = [tokens[n] for n in path_to(parents, node)]
        if kids:
            q = torch.softmax(says([*text.tokens, *path]) / 6.0, -1)
            torch.testing.assert_close(tree.probs[0, node], q)


def test_near_the_end_of_the_context_trees_get_smaller() -> None:
    drafter = build(tree="medusa")
    drafter.limit = 12
    text = sequence([1] * 9)
    commit(drafter, (text, 9))
    assert drafter.propose(ask([text], 63)).num_drafted == [3]
    assert all(max(rows.cells) < 12 for rows in drafter.runtime.log)


def test_nan_takes_the_children_of_that_node_only() -> None:
    drafter = build(tree="eagle")
    text = sequence([1, 2, 3])
    commit(drafter, (text, 3))
    drafter.runtime.spoil = {2}
    assert drafter.propose(ask([text], 63)).num_drafted == [4], "only the root's children"
    advance(drafter, [(text, [4])])
    assert drafter.propose(ask([text], 63)).num_drafted == [25]
