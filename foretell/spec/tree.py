"""A draft is a tree. A chain is a tree of width one; no draft is a tree of only its root.

Node 0 is the root: the last known token, not yet run through the target. A parent always comes
before its children, so ascending node order is depth order along any path, and one 64-bit word
for each node, bit j set where node j is the node itself or an ancestor, is the whole mask.
"""

# pyright: reportUnknownMemberType=false
# (torch's tolist and from_numpy are untyped)

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache, cached_property
from typing import cast

import torch
from torch import Tensor

MAX_NODES = 64
"""Root included: one machine word of ancestors for each node (bit 63 is the sign bit)."""


@dataclass(frozen=True)
class TokenTree:
    """Draft trees for a batch of sequences, padded to the widest."""

    tokens: Tensor  # [B, N] int64, node 0 is the root; padding is 0
    parents: Tensor  # [B, N] int64, parents[:, 0] == -1, else 0 <= parents[b, i] < i
    sizes: Tensor  # [B] int64, nodes in use, the root included: 1 <= sizes[b] <= N
    probs: Tensor | None = None
    """[B, N, V] float32: row i is the distribution that the children of node i were drawn from,
    without replacement and in node order. None: nodes were chosen deterministically."""
    chances: list[list[float]] | None = None
    """[B][N] how likely the draft takes each node to be accepted with all above it, 1 for roots."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.parents.shape
        assert self.tokens.shape[:1] == self.sizes.shape

    @property
    def num_drafted(self) -> list[int]:
        """Nodes of each tree, its root not counted."""
        return [len(tokens) - 1 for tokens, _ in self.lists()]

    def lists(self) -> list[tuple[list[int], list[int]]]:
        """For each sequence the tokens and the parents of its nodes, without padding; to read."""
        return self._lists

    @cached_property
    def _lists(self) -> list[tuple[list[int], list[int]]]:
        sizes = cast(list[int], self.sizes.tolist())
        tokens = cast(list[list[int]], self.tokens.tolist())
        parents = cast(list[list[int]], self.parents.tolist())
        return [(t[:n], p[:n]) for t, p, n in zip(tokens, parents, sizes, strict=True)]

    def check(self, vocab_size: int) -> None:
        """Asserts every invariant; the engine does for each proposal, and so do tests."""
        width = self.tokens.shape[1]
        assert 1 <= width <= MAX_NODES
        assert all(1 <= size <= width for size in cast(list[int], self.sizes.tolist()))
        for tokens, parents in self.lists():
            assert parents[0] == -1
            assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
            assert all(0 <= token < vocab_size for token in tokens)
            edges = list(zip(parents, tokens, strict=True))
            assert len(set(edges)) == len(edges), "siblings repeat a token"
        if self.probs is not None:
            assert self.probs.shape[:2] == self.tokens.shape


def roots(tokens: list[int]) -> TokenTree:
    """Trees without a draft: only the roots. Plain decoding makes one a step, so it is quick."""
    tree = TokenTree(torch.tensor(tokens, dtype=torch.int64)[:, None], *_no_drafts(len(tokens)))
    tree.__dict__["_lists"] = [([token], [-1]) for token in tokens]
    return tree


@cache
def _no_drafts(batch: int) -> tuple[Tensor, Tensor]:
    """Parents [B, 1] and sizes [B] of trees without a draft, to read."""
    return torch.full((batch, 1), -1, dtype=torch.int64), torch.ones(batch, dtype=torch.int64)


def from_lists(tokens: list[list[int]], parents: list[list[int]]) -> TokenTree:
    """Packs one token list and one parent list a sequence, root first, into padded tensors."""
    width = max((len(row) for row in tokens), default=1)

    def padded(rows: list[list[int]]) -> Tensor:
        full = [row + [0] * (width - len(row)) for row in rows]
        return torch.tensor(full, dtype=torch.int64).reshape(-1, width)

    tree = TokenTree(
        padded(tokens),
        padded(parents),
        torch.tensor([len(row) for row in tokens], dtype=torch.int64),
    )
    tree.__dict__["_lists"] = list(zip(tokens, parents, strict=True))
    return tree


def chains(roots: list[int], drafts: list[list[int]], probs: Tensor | None = None) -> TokenTree:
    """One chain a sequence; drafts may differ in length and be empty."""
    tree = from_lists(
        [[root, *draft] for root, draft in zip(roots, drafts, strict=True)],
        [list(range(-1, len(draft))) for draft in drafts],
    )
    return tree if probs is None else TokenTree(tree.tokens, tree.parents, tree.sizes, probs)


def cut(tree: TokenTree, limits: SequenceOf[int]) -> TokenTree:
    """Drops nodes that lie deeper than their sequence's limit. A limit that was known before the
    nodes were drawn changes no distribution."""
    lists = tree.lists()
    kept = [
        [i for i, depth in enumerate(depths(parents)) if depth <= limit]
        for (_, parents), limit in zip(lists, limits, strict=True)
    ]
    if all(len(rows) == len(tokens) for rows, (tokens, _) in zip(kept, lists, strict=True)):
        return tree
    places = [{old: new for new, old in enumerate(rows)} for rows in kept]
    out = from_lists(
        [[tokens[i] for i in rows] for rows, (tokens, _) in zip(kept, lists, strict=True)],
        [
            [place.get(parents[i], -1) for i in rows]
            for rows, place, (_, parents) in zip(kept, places, lists, strict=True)
        ],
    )
    chances = tree.chances
    if chances is not None:
        chances = [[own[i] for i in rows] for own, rows in zip(chances, kept, strict=True)]
    if tree.probs is None:
        return TokenTree(out.tokens, out.parents, out.sizes, None, chances)
    width = out.tokens.shape[1]
    rows = torch.tensor([row + [0] * (width - len(row)) for row in kept], device=tree.probs.device)
    probs = tree.probs[torch.arange(len(kept), device=rows.device)[:, None], rows]  # [B, N, V]
    return TokenTree(out.tokens, out.parents, out.sizes, probs, chances)


def ancestors(parents: list[int]) -> list[int]:
    """For each node of one tree the 64-bit word of its ancestors, itself included (bit 0: root)."""
    masks: list[int] = []
    for i, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return masks


def depths(parents: list[int]) -> list[int]:
    """Distance from the root for each node of one tree; the root is 0."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root (left out) down to ``node`` (included)."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def children(parents: list[int]) -> list[list[int]]:
    """For each node of one tree its children in node order."""
    out: list[list[int]] = [[] for _ in parents]
    for i, parent in enumerate(parents):
        if parent >= 0:
            out[parent].append(i)
    return out
