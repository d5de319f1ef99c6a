"""Verification: how far the target follows a draft, and which token it adds itself.

Pure functions of trees, of what the target said at each node, and of coins thrown beforehand. No
model, no engine, no random state: the same arguments always give the same outcomes, and tests sum
over every coin exactly.

``coupled`` (default), ``rejection`` and ``block`` leave the target's distribution unchanged;
``typical`` and ``threshold`` do not and are chosen by name only. Row i of a sequence is what the
target says *after* node i: it decides about the children of node i, and the replacement for a
refused child comes from that same row.
"""

# pyright: reportUnknownMemberType=false
# (torch's tolist and from_numpy are untyped)

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from foretell.config import Verification
from foretell.spec.tree import TokenTree, path_to

Laws = Tensor | SequenceOf[Tensor]
"""[B, N, V], or for each sequence [at least its size, V]: probabilities, rows sum to 1."""
Coins = SequenceOf[SequenceOf[float]]
"""[B][N] independent uniforms in [0, 1): entry i >= 1 decides about node i, entry 0 draws the
token that ends the step. They must not have decided anything else, the draft included."""
_T = TypeVar("_T", int, float)
_Accepts = Callable[[Tensor, int], bool]


@dataclass(frozen=True)
class Outcome:
    """What one sequence gained."""

    path: list[int]  # accepted nodes from the root (left out) downwards
    next_token: int  # the target's own extra token; -1 if failed
    failed: bool = False
    """The target's row where the walk ended is not a distribution: no token can come from it."""


def verify(
    rule: Verification,
    tree: TokenTree,
    *,
    choices: Tensor | SequenceOf[SequenceOf[int]] | None = None,
    p: Laws | None = None,
    coins: Tensor | Coins | None = None,
    threshold: float = 0.3,
) -> list[Outcome]:
    """Applies one rule to a batch of trees.

    Args:
        rule: ``coupled``, ``typical`` and ``threshold`` take the extra token from ``choices``;
            ``rejection`` and ``block`` from ``p`` and ``coins``. All but ``coupled`` need ``p``.
        choices: [B, N] int64, the target's own draw after each node; -1 where there is none.
        p: the target's final law after each node (temperature, filters and penalties applied).
        coins: [B, N] float64, see `Coins`.
        threshold: for ``typical`` epsilon, for ``threshold`` the least accepted probability.

    Returns:
        One outcome a sequence.
    """
    if rule == "coupled":
        assert choices is not None
        return coupled(tree, choices)
    assert p is not None, rule
    if rule == "rejection" or rule == "block":
        assert coins is not None
        return (rejection if rule == "rejection" else block)(tree, p, coins)
    assert choices is not None
    return (typical if rule == "typical" else at_least)(tree, p, choices, threshold)


def coupled(tree: TokenTree, choices: Tensor | SequenceOf[SequenceOf[int]]) -> list[Outcome]:
    """The target draws its own token after each node; a child that carries it is descended into.

    Exact for any draft chosen without looking at the target's coins, and for drafts made with the
    same position-keyed coins as well: the tokens are those of plain decoding, one by one.
    """
    drawn = _lists(choices)
    outcomes: list[Outcome] = []
    for b, (tokens, parents) in enumerate(tree.lists):
        own, node = drawn[b], 0
        path: list[int] = []
        y = own[0]
        for i in range(1, len(tokens)):  # children follow their parent: one sweep walks the tree
            if parents[i] == node and tokens[i] == y:
                path.append(i)
                node, y = i, own[i]
        outcomes.append(Outcome(path, y, failed=y < 0))
    return outcomes


def rejection(tree: TokenTree, p: Laws, coins: Tensor | Coins) -> list[Outcome]:
    """Speculative sampling on chains and trees: recursive rejection without replacement.

    Leviathan et al. 2211.17192 and Chen et al. 2302.01318 for chains; for siblings EAGLE
    (2401.15077), Sequoia (2402.12374). Exact.
    """
    thrown, outcomes = _lists(coins), list[Outcome]()
    for b, (tokens, parents) in enumerate(tree.lists):
        q = None if tree.probs is None else tree.probs[b]
        outcomes.append(_end(*rejection_path(tokens, parents, p[b], q, thrown[b]), thrown[b][0]))
    return outcomes


def block(tree: TokenTree, p: Laws, coins: Tensor | Coins) -> list[Outcome]:
    """Block verification of chains, Sun et al. 2403.10444. Exact, never fewer tokens on average
    than `rejection`, which it falls back to where a tree branches or was not sampled (a one-hot
    draft has nothing to gain)."""
    thrown, outcomes = _lists(coins), list[Outcome]()
    for b, (tokens, parents) in enumerate(tree.lists):
        u = thrown[b]
        q = None if tree.probs is None else tree.probs[b]
        if q is None or parents != list(range(-1, len(parents) - 1)):
            outcomes.append(_end(*rejection_path(tokens, parents, p[b], q, u), u[0]))
        else:
            outcomes.append(_end(*block_path(tokens, p[b], q, u), u[0]))
    return outcomes


def typical(
    tree: TokenTree,
    p: Laws,
    choices: Tensor | SequenceOf[SequenceOf[int]],
    epsilon: float = 0.09,
    delta: float | None = None,
) -> list[Outcome]:
    """Typical acceptance, Medusa (2401.10774): lossy. Accepts x if p(x) > min(epsilon,
    delta * exp(-H(p))), delta being sqrt(epsilon) unless given; the longest path wins."""
    delta = math.sqrt(epsilon) if delta is None else delta

    def accepted(row: Tensor, token: int) -> bool:
        entropy = -float(torch.xlogy(row, row).sum())
        return float(row[token]) > min(epsilon, delta * math.exp(-entropy))

    return _longest(tree, p, choices, accepted)


def at_least(
    tree: TokenTree,
    p: Laws,
    choices: Tensor | SequenceOf[SequenceOf[int]],
    threshold: float,
) -> list[Outcome]:
    """Lossy: accepts x if p(x) >= threshold; the longest path wins, of equal ones the likeliest."""
    return _longest(tree, p, choices, lambda row, token: float(row[token]) >= threshold)


def rejection_path(
    tokens: list[int],
    parents: list[int],
    p: Tensor,
    q: Tensor | None,
    coins: SequenceOf[float],
) -> tuple[list[int], Tensor | None]:
    """The walk of `rejection` for one sequence, up to the last draw.

    Args:
        tokens: [N] node 0 is the root.
        parents: [N]
        p: [N, V] target's laws.
        q: [N, V] laws that children were drawn from without replacement, or None for one-hot.
        coins: [N] entry i decides about node i.

    Returns:
        Accepted nodes, and unnormalised float64 weights [V] that the next token is drawn from, or
        None where the target's row is not a distribution.
    """
    path: list[int] = []
    node = 0
    weights = _law(p[0])  # the target's law, later what is left of it
    draft = _law(q[0]) if q is not None else None
    refused: list[int] = []
    for i in range(1, len(tokens)):
        if weights is None:
            break
        if parents[i] != node or (q is not None and draft is None):
            continue
        x = tokens[i]
        mass = float(weights[x])
        proposed = 1.0 if draft is None else float(draft[x])
        if proposed <= 0:
            continue  # not drawn from the law it came with
        if coins[i] * proposed < mass:
            path.append(i)
            node, refused = i, []
            weights = _law(p[i])
            draft = _law(q[i]) if q is not None else None
            continue
        refused.append(x)
        if draft is None:
            weights[x] = 0.0
        else:
            weights = (weights - draft).clamp_min_(0.0)
            draft[x] = 0.0
            draft = _normalised(draft)
        weights = _normalised(weights)
        if weights is None:  # p = q up to rounding: the refusal had probability 0
            weights = _without(p[node], refused)
    return path, weights


def block_path(
    tokens: list[int], p: Tensor, q: Tensor, coins: SequenceOf[float]
) -> tuple[list[int], Tensor | None]:
    """The walk of `block` for one chain; arguments and result as in `rejection_path`.

    A draft row or target row that is no distribution ends the chain before it, which is exact:
    rows are functions of the prefix.
    """
    targets = [_law(p[0])]
    drafts: list[Tensor] = []
    joint = [1.0]  # p_i = min(1, p_{i-1} p(X_i) / q(X_i))
    for i in range(1, len(tokens)):
        before, draft = targets[-1], _law(q[i - 1])
        x = tokens[i]
        if before is None or draft is None or float(draft[x]) <= 0:
            break
        drafts.append(draft)
        joint.append(min(1.0, joint[-1] * float(before[x]) / float(draft[x])))
        targets.append(_law(p[i]))
    k = len(drafts)
    length, rest = 0, targets[0]
    if k:
        rest = _left_over(joint[0], targets[0], drafts[0])
    for i in range(1, k + 1):
        if i == k:
            chance, left = joint[k], targets[k]
        else:
            left = _left_over(joint[i], targets[i], drafts[i])
            over = float(left.sum()) if left is not None else 0.0
            below = 1.0 - joint[i]
            chance = over / (over + below) if over + below > 0 else 1.0
        if coins[i] < chance:
            length, rest = i, left
    if length < k and rest is not None:
        rest = _normalised(rest)
        if rest is None:  # reached by rounding only, as in `rejection_path`
            rest = _without(p[length], [tokens[length + 1]])
    return list(range(1, length + 1)), rest


def invert(weights: Tensor, coin: float) -> int:
    """Draws from unnormalised weights [V] by the inverse of their running sum. Never a token of
    weight 0."""
    running = weights.double().cumsum(0)
    threshold = torch.tensor(coin * float(running[-1]), dtype=torch.float64, device=running.device)
    token = int(torch.searchsorted(running, threshold, right=True))
    if token >= len(running):  # coin * total rounded up to total
        token = int(weights.nonzero()[-1])
    return token


def _end(path: list[int], weights: Tensor | None, coin: float) -> Outcome:
    if weights is None:
        return Outcome(path, -1, failed=True)
    return Outcome(path, invert(weights, coin))


def _law(row: Tensor) -> Tensor | None:
    """A fresh float64 copy that sums to 1, or None if the row is no distribution."""
    weights = row.to(torch.float64, copy=True)
    low = float(weights.min())  # NaN if any entry is
    return _normalised(weights) if low >= 0 else None


def _normalised(weights: Tensor) -> Tensor | None:
    total = float(weights.sum())
    return weights.div_(total) if 0 < total < math.inf else None


def _left_over(joint: float, p: Tensor | None, q: Tensor) -> Tensor | None:
    return None if p is None else (joint * p - q).clamp_min_(0.0)


def _without(row: Tensor, refused: list[int]) -> Tensor | None:
    """The target's law without the refused tokens; with them if nothing else is left."""
    weights = row.to(torch.float64, copy=True)
    weights[refused] = 0.0
    kept = _normalised(weights)
    return kept if kept is not None else _law(row)


def _longest(
    tree: TokenTree, p: Laws, choices: Tensor | SequenceOf[SequenceOf[int]], accepted: _Accepts
) -> list[Outcome]:
    drawn, outcomes = _lists(choices), list[Outcome]()
    for b, (tokens, parents) in enumerate(tree.lists):
        score: dict[int, tuple[int, float]] = {0: (0, 0.0)}  # reached nodes: depth, log-likelihood
        rows: dict[int, Tensor | None] = {}
        for i in range(1, len(tokens)):
            parent = parents[i]
            if parent not in score:
                continue
            if parent not in rows:
                rows[parent] = _law(p[b][parent])
            row = rows[parent]
            if row is not None and accepted(row, tokens[i]):
                depth, likelihood = score[parent]
                score[i] = (depth + 1, likelihood + math.log(max(float(row[tokens[i]]), 1e-300)))
        best = max(score, key=lambda node: (*score[node], -node))
        y = drawn[b][best]
        outcomes.append(Outcome(path_to(parents, best), y, failed=y < 0))
    return outcomes


def _lists(values: Tensor | SequenceOf[SequenceOf[_T]]) -> SequenceOf[SequenceOf[_T]]:
    return cast(list[list[_T]], values.tolist()) if isinstance(values, Tensor) else values
