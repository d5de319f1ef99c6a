"""Medusa heads that learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from foretell.models.frozen import FrozenTarget
from foretell.models.teacher import Rows, Teacher
from foretell.spec.losses import Judged
from foretell.spec.training import TrainingBatch


class TrainableMedusa(nn.Module):
    """Medusa heads (2401.10774) that share the target's output projection: blocks x + silu(Wx + b)
    whose W and b begin at 0, so that each head begins by saying what the target says next."""

    method = "medusa"
    taps = (-1,)

    def __init__(
        self,
        target: FrozenTarget,
        num_heads: int = 4,
        num_layers: int = 1,
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.target = target.config.sizes
        hidden = target.config.hidden_size
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        for weight in self.parameters():
            nn.init.zeros_(weight)
        self.draft_ids = draft_ids
        self.teacher = Teacher(target, draft_ids)

    @property
    def config(self) -> dict[str, Any]:
        from foretell.models.trainable_files import medusa_config

        return medusa_config(self)

    def tensors(self) -> dict[str, Tensor]:
        """Float32, by the names that its directory has."""
        from foretell.models.trainable_files import medusa_tensors

        return medusa_tensors(self)

    def unroll(self, batch: TrainingBatch, steps: int | None = None) -> Iterator[Judged]:
        """Head i against the token i + 2 places behind each position."""
        rows = Rows(batch)
        judged = rows.judged()
        x = batch.features.flatten(0, 1).float()[judged]  # [M, H]
        lesson = self.teacher.lesson(batch, rows, len(self.heads))
        for i, blocks in enumerate(self.heads):
            assert isinstance(blocks, nn.ModuleList)
            out = x
            for block in blocks:
                out = out + F.silu(block(out))
            yield Judged(logits=self.teacher.say(out), **lesson(i))
