"""Experts: a token goes through a few of many small MLPs, and through shared ones.

A row's result must not depend on the rows beside it: each expert gets its rows in one product of
which each row is computed by itself, and a row's sum goes by its experts' numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.attention.rows import silu_mul
from foretell.models.deepseek_config import MoE
from foretell.models.linear import Linear

_VECTORS = 64
"""Numbers that torch computes at a time, or a multiple of it."""


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
    experts: list[Mlp]
    shared: Mlp | None

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = route(self.config, self.gate(x), self.bias)
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():  # ascending
            rows, place = (ids == expert).nonzero(as_tuple=True)
            out[rows] += self.experts[expert](x[rows]) * weights[rows, place, None]
        return out if self.shared is None else out + self.shared(x)


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
