"""What a head is to learn: which places of a batch count, and what the target says there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.models.frozen import FrozenTarget
from foretell.spec.training import TrainingBatch


class Rows:
    """Pairs of a batch laid out flat: [B, T] becomes R = B * T places."""

    def __init__(self, batch: TrainingBatch) -> None:
        rows, width = batch.tokens.shape
        self.tokens = batch.tokens.flatten()  # [R]
        self.positions = batch.positions.flatten()  # [R]
        row = torch.arange(rows, device=batch.tokens.device)[:, None] * width
        padding = batch.documents < 0
        self.documents = (batch.documents + row).masked_fill(padding, -1).flatten()  # [R]
        self.wanted = batch.wanted.flatten()  # [R]
        place = torch.arange(len(self.tokens), device=self.tokens.device)
        new = torch.ones_like(self.documents, dtype=torch.bool)
        new[1:] = self.documents[1:] != self.documents[:-1]
        self.first = torch.where(new, place, 0).cummax(0).values  # [R] start of the own text

    def ahead(self, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Places [M] ``count`` tokens on, and whether those belong to the same text."""
        there = (places + count).clamp(max=len(self.tokens) - 1)
        same = (self.documents[there] == self.documents[places]) & (there == places + count)
        return there, same & (self.documents[places] >= 0)

    def judged(self) -> Tensor:
        """Places [M] of pairs whose first guess, the token two places on, is a wanted one."""
        places = torch.arange(len(self.tokens), device=self.tokens.device)
        there, same = self.ahead(places, 2)
        return (same & self.wanted[there]).nonzero()[:, 0]


class Teacher(nn.Module):
    """The target's output projection, frozen, over the draft's vocabulary.

    Args:
        draft_ids: [Vd] the target's tokens that the draft speaks about, ascending; None: all.
    """

    weight: Tensor  # [Vd, H]
    place: Tensor  # [V] int64 draft id of a token, -1 where the draft lacks it

    def __init__(self, target: FrozenTarget, draft_ids: Tensor | None) -> None:
        super().__init__()
        vocab = target.config.vocab_size
        ids = torch.arange(vocab) if draft_ids is None else draft_ids
        weight = target.lm_head if draft_ids is None else target.lm_head[ids]
        place = torch.full((vocab,), -1).index_put((ids,), torch.arange(len(ids)))
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("place", place, persistent=False)

    def say(self, hidden: Tensor) -> Tensor:
        """Hidden states [M, H] behind the final norm -> logits [M, Vd]."""
        return F.linear(hidden.to(self.weight.dtype), self.weight)

    def lesson(
        self, batch: TrainingBatch, rows: Rows, steps: int
    ) -> Callable[[int], dict[str, Any]]:
        """For each step the target's logits, the text's own token and whether it counts, as
        `Judged` has them. What several steps ask for is computed once.

        Raises:
            ValueError: the batch has neither the target's last hidden states nor its top logits.
        """
        judged = rows.judged()
        needed = torch.zeros_like(rows.wanted)
        for j in range(steps):
            there, same = rows.ahead(judged, 1 + j)
            needed[there[same]] = True
        index = needed.cumsum(0) - 1  # [R] a place's row in the table
        with torch.no_grad():
            table = self._table(batch, needed)  # [N, Vd]

        def step(j: int) -> dict[str, Any]:
            before, _ = rows.ahead(judged, 1 + j)
            there, same = rows.ahead(judged, 2 + j)
            return {
                "target": table[index[before].clamp(min=0)],
                "labels": self.place[rows.tokens[there]],
                "valid": same & rows.wanted[there],
            }

        return step

    def _table(self, batch: TrainingBatch, needed: Tensor) -> Tensor:
        if batch.hidden is not None:
            return self.say(batch.hidden.flatten(0, 1)[needed])
        if batch.top_ids is None or batch.top_logits is None:
            raise ValueError(
                "the features hold neither the target's last hidden states (tap -1) nor its top "
                "logits: compute them with one of the two"
            )
        ids = self.place[batch.top_ids.flatten(0, 1)[needed]]  # [N, K]
        logits = batch.top_logits.flatten(0, 1)[needed].float()
        width = len(self.weight)
        table = logits.new_full((len(ids), width + 1), -torch.inf)
        return table.scatter(1, ids.where(ids >= 0, width), logits)[:, :width]
