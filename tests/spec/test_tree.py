"""Properties of the tree helpers over random trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.spec.tree import (
    MAX_NODES,
    TokenTree,
    ancestors,
    chains,
    children,
    cut,
    depths,
    from_lists,
    path_to,
    roots,
)


@st.composite
def parent_lists(draw: st.DrawFn, longest: int = MAX_NODES) -> list[int]:
    size = draw(st.integers(1, longest))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]


@given(parent_lists())
def test_helpers_agree(parents: list[int]):
    masks, deep, kids = ancestors(parents), depths(parents), children(parents)
    for i, parent in enumerate(parents):
        path = path_to(parents, i)
        assert masks[i] == 1 | sum(1 << node for node in path)
        assert masks[i].bit_count() == deep[i] + 1 == len(path) + 1
        assert masks[i] >> (i + 1) == 0
        assert masks[i] < 1 << MAX_NODES
        assert path == sorted(path)
        assert (i in kids[parent]) if i else parent == -1
        assert kids[i] == sorted(kids[i])
    assert sum(map(len, kids)) == len(parents) - 1


@given(st.lists(parent_lists(9), min_size=1, max_size=4))
def test_packing_pads_and_passes_its_own_check(shapes: list[list[int]]):
    tokens = [list(range(len(parents))) for parents in shapes]
    tree = from_lists(tokens, shapes)
    tree.check(vocab_size=9)
    assert tree.num_drafted == [len(parents) - 1 for parents in shapes]
    for b, parents in enumerate(shapes):
        assert tree.tokens[b, : len(parents)].tolist() == tokens[b]
        assert tree.parents[b, : len(parents)].tolist() == parents
        assert not tree.tokens[b, len(parents) :].any()


def test_roots_and_empty_chains_are_the_same():
    plain, empty = roots([4, 5]), chains([4, 5], [[], []])
    assert torch.equal(plain.tokens, empty.tokens)
    assert torch.equal(plain.parents, empty.parents)
    assert plain.num_drafted == [0, 0]
    assert roots([]).tokens.shape == (0, 1)


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([[0, 1, 1]], [[-1, 0, 0]]),  # siblings repeat a token
        ([[0, 9]], [[-1, 0]]),  # not in the vocabulary
        ([[0, 1]], [[-1, 1]]),  # its own parent
        ([[0, 1]], [[0, 0]]),  # no root
        ([[0, 1]], [[-1]]),  # a node without a parent
    ],
)
def test_check_refuses(tokens: list[list[int]], parents: list[list[int]]):
    with pytest.raises(AssertionError):
        from_lists(tokens, parents).check(vocab_size=9)


def test_check_refuses_laws_of_another_size():
    tree = chains([0], [[1]], torch.zeros(1, 3, 9))
    with pytest.raises(AssertionError):
        tree.check(vocab_size=9)


@given(parent_lists(), st.integers(0, 6))
def test_a_cut_tree_keeps_what_is_not_too_deep(parents, limit):
    count = len(parents)
    law = torch.arange(float(2 * count * 3)).view(2, count, 3)
    whole = TokenTree([(list(range(count)), parents), ([7], [-1])], law)
    tree = cut(whole, [limit, 0])
    tree.check(100)
    tokens, above = tree.lists[0]
    assert tokens == [i for i, depth in enumerate(depths(parents)) if depth <= limit]
    for i, node in enumerate(tokens):
        assert [tokens[j] for j in path_to(above, i)] == path_to(parents, node)
        assert torch.equal(tree.probs[0, i], law[0, node])
    assert tree.lists[1] == ([7], [-1])
