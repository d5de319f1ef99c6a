"""A draft is a tree. A chain is a tree of width one; no draft is a tree of only its root.

Node 0 is the root: the last known token, not yet run through the target. A parent always comes
before its children, so ascending node order is depth order along any path, and one 64-bit word
for each node, bit j set where node j is the node itself or an ancestor, is the whole mask.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

MAX_NODES = 64
"""Root included: one machine word of ancestors for each node (bit 63 is the sign bit)."""


@dataclass(frozen=True)
class TokenTree:
    """Draft trees for a batch of sequences. Small, and read by the host: kept as lists."""

    lists: list[tuple[list[int], list[int]]]
    """[B] tokens and parents of each tree's nodes, 63 and the root at most; to read. Node 0 is the
    root, parents[0] == -1, else 0 <= parents[i] < i."""
    probs: Tensor | None = None
    """[B, N, V] float32, N as in `tokens`: row i is the distribution that the children of node i
    were drawn from, without replacement and in node order. None: chosen deterministically."""
    chances: list[list[float]] | None = None
    """[B][N] how likely the draft takes each node to be accepted with all above it, 1 for roots."""

    @property
    def sizes(self) -> list[int]:
        """[B] nodes of each tree, its root included."""
        return [len(tokens) for tokens, _ in self.lists]

    @property
    def width(self) -> int:
        """N, nodes of the largest tree."""
        return max(self.sizes, default=1)

    @cached_property
    def tokens(self) -> Tensor:
        """[B, N] int64, padded with 0."""
        return self._padded(0)

    @cached_property
    def parents(self) -> Tensor:
        """[B, N] int64, padded with 0."""
        return self._padded(1)

    def _padded(self, which: int) -> Tensor:
        width = self.width
        rows = [pair[which] + [0] * (width - len(pair[0])) for pair in self.lists]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, width)

    @property
    def num_drafted(self) -> list[int]:
        """Nodes of each tree, its root not counted."""
        return [len(tokens) - 1 for tokens, _ in self.lists]

    def check(self, vocab_size: int) -> None:
        """Asserts every invariant; the engine does for each proposal, and so do tests."""
        assert self.width <= MAX_NODES
        for tokens, parents in self.lists:
            assert len(tokens) == len(parents) >= 1
            assert parents[0] == -1
            assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
            assert all(0 <= token < vocab_size for token in tokens)
            assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "siblings repeat"
        if self.probs is not None:
            assert self.probs.shape[:2] == (len(self.lists), self.width)


def roots(tokens: list[int]) -> TokenTree:
    """Trees without a draft: only the roots."""
    return TokenTree([([token], [-1]) for token in tokens])


def from_lists(tokens: list[list[int]], parents: list[list[int]]) -> TokenTree:
    """One token list and one parent list a sequence, root first."""
    return TokenTree(list(zip(tokens, parents, strict=True)))


def chains(roots: list[int], drafts: list[list[int]], probs: Tensor | None = None) -> TokenTree:
    """One chain a sequence; drafts may differ in length and be empty."""
    tree = from_lists(
        [[root, *draft] for root, draft in zip(roots, drafts, strict=True)],
        [list(range(-1, len(draft))) for draft in drafts],
    )
    return replace(tree, probs=probs)


def cut(tree: TokenTree, limits: SequenceOf[int]) -> TokenTree:
    """Drops nodes that lie deeper than their sequence's limit. A limit that was known before the
    nodes were drawn changes no distribution."""
    lists = tree.lists
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
        return replace(out, chances=chances)
    padded = [row + [0] * (out.width - len(row)) for row in kept]
    rows = torch.tensor(padded, device=tree.probs.device)
    probs = tree.probs[torch.arange(len(kept), device=rows.device)[:, None], rows]  # [B, N, V]
    return replace(out, probs=probs, chances=chances)


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
