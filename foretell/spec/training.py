"""What a head learns from, and what it is told about it. The training counterpart of `drafter`.

A batch holds whole texts with what the target computed over them; a scheme's `loss` unrolls its
own rule over it and says how far off it was. Nothing here knows of files, optimisers or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["kl", "ce", "lk"]


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Texts with the target's hidden states. Several short texts may share a row (packing)."""

    tokens: Tensor  # [B, T] int64
    documents: Tensor  # [B, T] int64 which text of the row, counted from 0; -1 is padding
    positions: Tensor  # [B, T] int64 place in its own text
    wanted: Tensor  # [B, T] bool: a token of the target's answer, the ones that heads are for
    features: Tensor  # [B, T, taps * H] what `Needs.features` names, side by side
    hidden: Tensor | None = None  # [B, T, H] the final norm's output, which lm_head reads
    top_ids: Tensor | None = None  # [B, T, K] int64 and
    top_logits: Tensor | None = None  # [B, T, K] the target's largest logits, in place of hidden

    @property
    def num_wanted(self) -> Tensor:
        """Scalar int64: what sums over this batch are to be divided by."""
        return self.wanted.sum()

    def with_prompts(self) -> TrainingBatch:
        """All tokens wanted: the target's law over a prompt is as good a lesson, and is there."""
        return replace(self, wanted=self.documents >= 0)

    def to(self, device: torch.device) -> TrainingBatch:
        moved = {n: None if t is None else t.to(device) for n, t in vars(self).items()}
        return TrainingBatch(**moved)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a head is told off. Schemes have defaults of their own (`Drafter.rule`).

    Args:
        steps: draft tokens to unroll over the head's own output (training-time test, EAGLE-3).
        decay: weight of step j is decay^j before weights are normalised to sum 1.
        divergence: kl to the target's law; ce to its likeliest token's label; lk: kl that gives
            way to 1 - acceptance as that grows (LK losses, 2602.23881).
        regression: weight of SmoothL1 between the head's feature and the target's (EAGLE).
    """

    steps: int = 3
    decay: float = 0.8
    divergence: Divergence = "kl"
    regression: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be at least 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay}: must be above 0 and at most 1")
        if self.divergence not in ("kl", "ce", "lk"):
            raise ValueError(f"divergence={self.divergence!r}: choose one of kl, ce, lk")
        if self.regression < 0:
            raise ValueError(f"regression={self.regression}: must be 0 or more")


@dataclass(frozen=True)
class Loss:
    """Sums over a batch's wanted tokens: whoever has several batches or ranks adds them up and
    divides once by how many tokens there were."""

    total: Tensor  # scalar float32, what to differentiate
    parts: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # detached scalars
    agreed: Tensor | None = None  # [steps] sum of acceptance probabilities 1 - TV at temperature 1
    matched: Tensor | None = None  # [steps] how often draft's and target's likeliest are one
    counted: Tensor | None = None  # [steps] tokens that a step could be judged by
