"""A run's features without a pass of the target: random texts of its vocabulary, random states."""

from __future__ import annotations

from pathlib import Path

import torch

from foretell.models.frozen import FrozenTarget
from foretell.train.batches import Text
from foretell.train.files import target_digest
from foretell.train.store import Index, write_shard


def write_features(
    run: Path, target: Path, *, texts: int = 40, taps: tuple[int, ...] = (-1,), seed: int = 0
) -> Path:
    """Writes RUN/features in one shard; the text of a token is decided by the one before."""
    config = FrozenTarget.open(str(target)).config
    index = Index(
        target=str(target), target_digest=target_digest(str(target)), weights="f32",
        taps=list(taps), hidden_size=config.hidden_size, topk=0, max_len=64, source="answers.jsonl",
    )  # fmt: skip
    directory = run / "features"
    directory.mkdir(parents=True)
    g = torch.Generator().manual_seed(seed)
    follows = torch.randperm(config.vocab_size, generator=g)
    states = torch.randn(config.vocab_size, len(taps) * config.hidden_size, generator=g)
    made = []
    for _ in range(texts):
        length = int(torch.randint(8, 40, (), generator=g))
        tokens = [int(torch.randint(config.vocab_size, (), generator=g))]
        while len(tokens) < length:
            tokens.append(int(follows[tokens[-1]]))
        ids = torch.tensor(tokens)
        wanted = torch.arange(length) >= 3
        made.append(Text(ids, wanted, states[ids].bfloat16()))
    write_shard(directory, index, made, f"{seed}-{texts}")
    return run
