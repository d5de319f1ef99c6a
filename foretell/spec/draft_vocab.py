"""A draft's own, smaller vocabulary: the one place where its ids become the target's.

FR-Spec (2502.14856) and EAGLE-3 (2503.01840): a head with rows for the most frequent tokens only.
Tokens are picked among the draft's ids, so that nothing is as wide as the target's vocabulary but
the laws that verification asks for.
"""

# pyright: reportUnknownMemberType=false
# (torch's tolist is untyped)

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


class DraftVocab:
    """Which target ids a draft's logits speak about.

    Args:
        size: the target's vocabulary.
        ids: [Vd] int64, the target's id for each draft id, all different. None: draft ids are the
            target's; a draft padded beyond ``size`` is cut, and one that ends before it never
            proposes the rest.
        device: where logits lie.

    Raises:
        ValueError: an id outside the target's vocabulary, or one that comes twice.
    """

    def __init__(
        self, size: int, ids: Tensor | None = None, device: torch.device | None = None
    ) -> None:
        self.size, self.ids = size, None if ids is None else ids.to(device=device)
        if ids is not None:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= size:
                raise ValueError(f"draft ids map to {low} .. {high}, outside of 0 .. {size - 1}")
            if ids.unique().numel() < ids.numel():
                raise ValueError("two draft ids map to one token of the target")

    @classmethod
    def from_offsets(cls, d2t: Tensor, size: int) -> DraftVocab:
        """From the tensor ``d2t`` of EAGLE-3 checkpoints: target id = draft id + d2t[draft id]."""
        ids = d2t.to(torch.int64)
        return cls(size, torch.arange(len(ids), device=ids.device) + ids)

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [F, Vd] without columns that mean no token of the target."""
        width = self.width(logits)
        return logits if logits.shape[1] == width else logits[:, :width]

    def width(self, logits: Tensor) -> int:
        """How many columns of logits [F, Vd] mean a token."""
        return min(logits.shape[1], self.size if self.ids is None else len(self.ids))

    def tokens(self, picked: Tensor) -> list[list[int]]:
        """Draft ids [F, C] as the target's."""
        return cast(list[list[int]], (picked if self.ids is None else self.ids[picked]).tolist())

    def spread(self, probs: Tensor) -> Tensor:
        """Laws [F, Vd] over the target's vocabulary [F, V]; tokens that the draft lacks get 0."""
        if self.ids is None and probs.shape[1] == self.size:
            return probs
        wide = torch.zeros(len(probs), self.size, dtype=probs.dtype, device=probs.device)
        if self.ids is None:
            wide[:, : probs.shape[1]] = probs
        else:
            wide[:, self.ids] = probs
        return wide
