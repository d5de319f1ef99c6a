"""The tokens that a head with a small vocabulary should know: the most frequent ones of answers.

FR-Spec (2502.14856) and EAGLE-3 (2503.01840): most of what a target says are few of its tokens,
and the product with lm_head is the largest part of a small head.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretell.files import write_whole
from foretell.models.hub import resolve
from foretell.models.loader import open_source
from foretell.train.samples import Sample, read_samples, texts_of


@dataclass(frozen=True)
class Ranking:
    """Tokens of answers by how often they come."""

    ids: np.ndarray  # [V] int64, most frequent first; unused ones last, low ids first
    counts: np.ndarray  # [V] int64, in that order

    def coverage(self, size: int) -> float:
        """Share of answer tokens that the first ``size`` are."""
        return float(self.counts[:size].sum() / max(1, self.counts.sum()))


def rank(samples: Iterable[Sample], vocab_size: int) -> Ranking:
    """Counts the wanted tokens."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.tokens[sample.wanted], minlength=vocab_size)
    ids = np.argsort(-counts, kind="stable")
    return Ranking(ids, counts[ids])


def draft_vocabulary(run: Path, model: str, sizes: Sequence[int]) -> Ranking:
    """Writes draft_vocab.json, the first ``sizes[0]`` ids by frequency.

    Raises:
        ValueError: no texts, no answers in them, or a size that the vocabulary does not have.
    """
    _, config = open_source(resolve(model))
    for size in sizes:
        if not 1 <= size <= config.vocab_size:
            raise ValueError(f"size={size}: must be from 1 to the vocabulary's {config.vocab_size}")
    source = texts_of(run)
    ranking = rank(read_samples(source, config.vocab_size), config.vocab_size)
    if not ranking.counts.any():
        raise ValueError(f"{source}: no text has an answer; run foretell train regenerate first")
    ids = json.dumps(ranking.ids[: sizes[0]].tolist())
    write_whole(run / "draft_vocab.json", ids.encode())
    return ranking
