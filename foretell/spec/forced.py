"""Drafts that cost nothing: tokens that an answer's grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from foretell.spec.tree import TokenTree, from_lists

MOST_FORCED = 16
"""Draft tokens of one step that a grammar may propose."""


def with_forced(tree: TokenTree, forced: SequenceOf[SequenceOf[int]]) -> TokenTree:
    """A chain of forced tokens in place of a draft that does not hold it.

    A scheme's tree that begins with the whole chain stays, for it may reach further. A tree whose
    nodes were drawn makes way always: a choice by what was drawn would change the distribution.

    Args:
        forced: [B] tokens that will probably follow each root; nothing where nothing is forced.
    """
    kept = [
        not chain or (tree.probs is None and _holds(tokens, parents, chain))
        for chain, (tokens, parents) in zip(forced, tree.lists, strict=True)
    ]
    if all(kept):
        return tree
    rows = [
        (tokens, parents) if keep else ([tokens[0], *chain], list(range(-1, len(chain))))
        for keep, chain, (tokens, parents) in zip(kept, forced, tree.lists, strict=True)
    ]
    new = from_lists([tokens for tokens, _ in rows], [parents for _, parents in rows])
    if tree.probs is None:
        return new
    return replace(new, probs=_one_hot(tree.probs, new, kept))


def _holds(tokens: list[int], parents: list[int], chain: SequenceOf[int]) -> bool:
    node = 0
    edges = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True))}
    for token in chain:
        node = edges.get((node, token), -1)
        if node < 0:
            return False
    return True


def _one_hot(probs: Tensor, tree: TokenTree, kept: list[bool]) -> Tensor:
    """[B, N, V] float32: ``probs`` for trees that were kept, certainty along the chains."""
    batch, width = len(tree.lists), tree.width
    out = probs.new_zeros(batch, width, probs.shape[2])
    shared = min(width, probs.shape[1])
    out[:, :shared] = probs[:, :shared]
    for b, (tokens, _) in enumerate(tree.lists):
        if not kept[b]:
            out[b] = 0.0
            nodes = torch.arange(len(tokens) - 1, device=out.device)
            out[b, nodes, torch.tensor(tokens[1:], device=out.device)] = 1.0
    return out
