"""Those parts of a target that training reads and never changes, in any float dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretell.models.checkpoint import Checkpoint
from foretell.models.config import ModelConfig
from foretell.models.hub import resolve
from foretell.models.loader import open_source


@dataclass(frozen=True, kw_only=True)
class FrozenTarget:
    """Embedding and output projection: a checkpoint's tensors, not a format's, so that what is
    trained on them serves every format."""

    config: ModelConfig
    path: Path
    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H], the same tensor where the two are tied

    @classmethod
    def open(cls, spec: str, dtype: torch.dtype = torch.float32) -> FrozenTarget:
        """
        Args:
            spec: as `loader.load`.
            dtype: of embedding and lm_head.

        Raises:
            ValueError: as `loader.load`.
        """
        path = resolve(spec)
        source, config = open_source(path)
        take, names = Checkpoint(source).take, source.shapes
        shape = (config.vocab_size, config.hidden_size)
        embedding = take("model.embed_tokens.weight", *shape).to(dtype)
        tied = config.tie_embeddings or "lm_head.weight" not in names
        return cls(
            config=config,
            path=path,
            embedding=embedding,
            lm_head=embedding if tied else take("lm_head.weight", *shape).to(dtype),
        )
