"""Experts: a token goes through a few of many small MLPs, and through shared ones.

A row's result must not depend on the rows beside it: each expert gets its rows in one product of
which each row is computed by itself, and a row's sum goes by its experts' numbers.

Of several ranks each has a range of the experts (expert parallelism, GShard, 2006.16668), and all
have the same rows. Few ranks or rows are soonest done with a sum of what each rank's experts make.
Else each rank sees to a share of the rows: sends them to the ranks of their experts, adds up what
comes back in the same order, and tells the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.attention.rows import silu_mul
from foretell.models.deepseek_config import MoE
from foretell.models.linear import Linear
from foretell.models.sharding import Ranks, Steps

_VECTORS = 64
"""Numbers that torch computes at a time, or a multiple of it."""
SENT_FROM = 64
"""Rows from which on more than two ranks send them all to all (docs/ranks.md)."""


@dataclass(slots=True)
class Mlp:
    """down(silu(gate) * up) of [R, H]."""

    gate_up: Linear  # H -> 2 * I
    down: Linear  # I -> H

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


@dataclass(slots=True)
class Experts:
    """The block of a layer with experts, [R, H] -> [R, H]."""

    config: MoE
    gate: Linear  # H -> num_experts
    bias: Tensor | None  # [num_experts] of the choice, not of the weights
    experts: list[Mlp]  # those of this rank
    shared: Mlp | None

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = route(self.config, self.gate(x), self.bias)
        out = self._routed(x, ids, weights)
        return out if self.shared is None else out + self.shared(x)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What this rank's experts make of rows [R, H] that `route` has sent somewhere."""
        out, held = torch.zeros_like(x), self.config.held
        for expert in ids.unique().tolist():  # ascending
            if expert in held:
                rows, place = (ids == expert).nonzero(as_tuple=True)
                made = self.experts[expert - held.start](x[rows])
                out[rows] += made * weights[rows, place, None]
        return out

    def over_ranks(self, x: Tensor, ranks: Ranks) -> Steps[Tensor]:
        """The same over ranks; the bits do not depend on the way that is taken."""
        ids, weights = route(self.config, self.gate(x), self.bias)
        if ranks.world > 2 and len(x) >= SENT_FROM:
            return (yield from self._all_to_all(x, ids, weights, ranks))
        out = yield ranks.start_sum(self._routed(x, ids, weights))
        return out if self.shared is None else out + self.shared(x)

    def _all_to_all(self, x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks) -> Steps[Tensor]:
        """As each rank sees where all rows go, nobody needs to be told how many are coming."""
        rank, world, rows = ranks.rank, ranks.world, len(x)
        at = ((ids + 1) * world - 1) // self.config.num_experts  # [R, per_token] ranks of experts
        go = [(at == other).any(dim=1) for other in range(world)]  # each [R]: does it go there?
        borders = [other * rows // world for other in range(world + 1)]
        shares = [slice(first, end) for first, end in pairwise(borders)]
        mine = shares[rank]
        sent = [x[mine][there[mine]] for there in go]
        come = [int(go[rank][share].sum()) for share in shares]
        here = yield ranks.start_exchange(sent, come)
        made = self._routed(torch.cat(here), ids[go[rank]], weights[go[rank]])
        back = yield ranks.start_exchange(list(made.split(come)), [len(part) for part in sent])
        out = torch.zeros_like(x[mine])
        for there, part in zip(go, back, strict=True):  # in the order of ranks and so of experts
            out[there[mine]] += part
        if self.shared is not None:
            out += self.shared(x[mine])
        told = yield ranks.start_exchange([out] * world, [s.stop - s.start for s in shares])
        return torch.cat(told)


def route(config: MoE, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where rows go (DeepSeek-V3, 2412.19437, section 2.1.2; DeepSeek-V2's `group_limited_greedy`).

    Args:
        logits: [R, num_experts] float32 of the gate.
        bias: [num_experts], added to scores for the choice only.

    Returns:
        Ascending numbers of experts [R, per_token] int64 and their weights [R, per_token].
    """
    rows, per_token = len(logits), config.per_token
    scores = _sigmoid(logits) if config.sigmoid else logits.softmax(dim=1)
    choice = scores if bias is None else scores + bias
    if config.groups_per_token < config.num_groups:
        groups = choice.view(rows, config.num_groups, -1)
        best = groups.topk(min(1 + config.sigmoid, groups.shape[2]), dim=2).values
        worth = best[:, :, 0] if best.shape[2] == 1 else best[:, :, 0] + best[:, :, 1]
        kept = worth.topk(config.groups_per_token, dim=1).indices
        out = torch.ones_like(worth, dtype=torch.bool).scatter(1, kept, False)
        choice = groups.masked_fill(out[:, :, None], -torch.inf).flatten(1)
    ids = choice.topk(per_token, dim=1).indices.sort(dim=1).values
    weights = scores.gather(1, ids)
    if config.normalized:
        total = weights[:, :1]
        for place in range(1, per_token):  # in order, however many rows there are
            total = total + weights[:, place : place + 1]
        weights = weights / (total + 1e-20)
    return ids, weights * config.scale


def _sigmoid(x: Tensor) -> Tensor:
    """Torch computes what is left over beside its vectors by another function, with other last
    bits: whole vectors for each row, then."""
    width = x.shape[1]
    return F.pad(x, (0, -width % _VECTORS)).sigmoid()[:, :width]
