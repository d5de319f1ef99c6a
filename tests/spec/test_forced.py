"""Forced tokens in place of drafts."""

from __future__ import annotations

from dataclasses import replace

import torch

from foretell.spec.forced import with_forced
from foretell.spec.tree import chains, from_lists, roots


def test_a_chain_takes_the_place_of_what_does_not_hold_it():
    tree = chains([7, 8, 9], [[1, 2, 3], [1, 5], []])
    forced = with_forced(tree, [(1, 2), (1, 2), (4,)])
    forced.check(20)
    assert [tokens for tokens, _ in forced.lists] == [[7, 1, 2, 3], [8, 1, 2], [9, 4]]
    assert with_forced(tree, [(), (1, 5), ()]) is tree


def test_a_branch_may_hold_it():
    tree = from_lists([[7, 1, 2, 3, 4]], [[-1, 0, 0, 2, 3]])
    assert with_forced(tree, [(2, 3)]) is tree
    changed = with_forced(tree, [(1, 3)])
    assert changed.lists == [([7, 1, 3], [-1, 0, 1])]


def test_what_was_drawn_does_not_decide_whether_a_chain_comes():
    probs = torch.rand(2, 3, 10)
    tree = chains([7, 8], [[1, 2], [3, 4]])
    drawn = replace(tree, probs=probs)
    for draft in ([1, 2], [1, 3]):  # the same chain, whether the draft agrees or not
        forced = with_forced(drawn, [draft, ()])
        assert forced.lists == [([7, *draft], [-1, 0, 1]), ([8, 3, 4], [-1, 0, 1])]
        assert forced.probs is not None
        assert forced.probs[0, 0].nonzero().tolist() == [[draft[0]]]
        assert forced.probs[0, 1].nonzero().tolist() == [[draft[1]]]
        assert torch.equal(forced.probs[1], probs[1])


def test_a_longer_chain_widens_the_batch():
    tree = roots([7, 8])
    forced = with_forced(tree, [(1, 2, 3), ()])
    forced.check(20)
    assert forced.lists == [([7, 1, 2, 3], [-1, 0, 1, 2]), ([8], [-1])]
