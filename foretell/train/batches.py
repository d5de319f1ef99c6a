"""Texts packed into rows and rows into batches: the same ones for the same seed and epoch.

Which texts share a row is decided once, by the seed; each epoch shuffles the rows. So every epoch
has as many batches, and a place in one can be come back to without reading what is before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foretell.spec.training import TrainingBatch

_OPEN = 64
"""Rows that wait for texts that fit: enough to leave about one token in a hundred empty."""


class Batches(Protocol):
    """What a trainer reads."""

    def num_batches(self, rank: int = 0, world: int = 1) -> int:
        """Batches of an epoch, the same on every rank."""
        ...

    def epoch(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[TrainingBatch]:
        """Batch ``start`` of this rank and all behind it."""
        ...


@dataclass(frozen=True, eq=False)
class Text:
    """One text with what the target computed over it, as it is stored."""

    tokens: Tensor  # [T] int
    wanted: Tensor  # [T] bool
    features: Tensor  # [T, taps * H] bfloat16
    top_ids: Tensor | None = None  # [T, K]
    top_logits: Tensor | None = None  # [T, K] bfloat16


class Texts(Protocol):
    """Where texts come from: a store, or the engine itself."""

    taps: tuple[int, ...]
    hidden_size: int
    target: str

    def lengths(self, max_len: int) -> list[int]:
        """Tokens of each text cut to max_len; 0 for one that has then no answer to learn."""
        ...

    def read(self, places: Sequence[int], max_len: int) -> list[Text]:
        """Texts in that order, cut to max_len."""
        ...


def pack(lengths: Sequence[int], max_len: int, seed: int) -> list[list[int]]:
    """First fit in shuffled order: texts of each row, longest possible row max_len.

    Args:
        lengths: [S], at most max_len; texts of length 0 are left out.
    """
    order = np.random.default_rng([seed, 0]).permutation(len(lengths))
    rows: list[list[int]] = []
    free: list[tuple[int, list[int]]] = []  # (tokens that still fit, row), oldest first
    for text in order.tolist():
        length = lengths[text]
        if not length:
            continue
        at = next((i for i, (room, _) in enumerate(free) if length <= room), None)
        if at is None:
            rows.append([text])
            free.append((max_len - length, rows[-1]))
        else:
            room, row = free[at]
            row.append(text)
            free[at] = (room - length, row)
            if room == length:
                del free[at]
        if len(free) > _OPEN:
            del free[min(range(len(free)), key=lambda i: free[i][0])]
    return rows


class PackedBatches:
    """`Batches` over any source of texts.

    Args:
        texts: where they come from.
        taps: those of the source's taps that a head reads; all if not given.
        max_len: tokens of a row; a longer text is cut.
        batch_tokens: tokens of a batch, padding included; at least one row.

    Raises:
        ValueError: the source lacks a tap, or has nothing to learn from.
    """

    def __init__(
        self,
        texts: Texts,
        *,
        taps: tuple[int, ...] | None = None,
        max_len: int = 1024,
        batch_tokens: int = 8192,
        seed: int = 0,
    ) -> None:
        self.texts = texts
        self.taps = texts.taps if taps is None else taps
        self.hidden_size, self.target = texts.hidden_size, texts.target
        self._seed, self._max_len = seed, max_len
        if missing := [tap for tap in self.taps if tap not in texts.taps]:
            raise ValueError(
                f"the features have layers {_listed(texts.taps)}, and the head reads layer "
                f"{missing[0]}: make them again with --taps {_listed((*texts.taps, *missing))}"
            )
        lengths = texts.lengths(max_len)
        self.num_tokens = sum(lengths)
        self.rows = pack(lengths, max_len, seed)
        self._rows_a_batch = max(1, batch_tokens // max_len)
        if not self.rows:
            raise ValueError(
                "no text has an answer to learn from: run regenerate, or raise max_len"
            )

    def num_batches(self, rank: int = 0, world: int = 1) -> int:
        """Batches of an epoch; what does not go round is left out, others each time."""
        return -(-len(self.rows) // self._rows_a_batch) // world

    def epoch(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[TrainingBatch]:
        """Batch b of rank r is batch b * world + r of one process."""
        order = np.random.default_rng([self._seed, 1, epoch]).permutation(len(self.rows)).tolist()
        size = self._rows_a_batch
        for b in range(start, self.num_batches(rank, world)):
            at = (b * world + rank) * size
            yield self._batch([self.rows[row] for row in order[at : at + size]])

    def _batch(self, rows: list[list[int]]) -> TrainingBatch:
        texts = iter(self.texts.read([text for row in rows for text in row], self._max_len))
        packed = [[next(texts) for _ in row] for row in rows]
        width = max(sum(len(text.tokens) for text in row) for row in packed)

        def lay(
            parts: list[list[Tensor]], fill: int = 0, like: torch.dtype | None = None
        ) -> Tensor:
            some = parts[0][0]
            out = torch.full((len(rows), width, *some.shape[1:]), fill, dtype=like or some.dtype)
            for line, row in zip(out, parts, strict=True):
                at = 0
                for part in row:
                    line[at : at + len(part)] = part
                    at += len(part)
            return out

        def of(name: str, like: torch.dtype) -> Tensor:
            return lay([[getattr(text, name) for text in row] for row in packed], like=like)

        features = self._columns(packed, self.taps)
        hidden = self._columns(packed, (-1,)) if -1 in self.texts.taps else None
        has_top = packed[0][0].top_ids is not None
        counts = [[torch.full_like(t.tokens, i) for i, t in enumerate(row)] for row in packed]
        places = [[torch.arange(len(t.tokens)) for t in row] for row in packed]
        return TrainingBatch(
            tokens=of("tokens", torch.int64),
            documents=lay(counts, -1, torch.int64),
            positions=lay(places),
            wanted=of("wanted", torch.bool),
            features=lay(features, like=torch.float32),
            hidden=None if hidden is None else lay(hidden, like=torch.float32),
            top_ids=of("top_ids", torch.int64) if has_top else None,
            top_logits=of("top_logits", torch.float32) if has_top else None,
        )

    def _columns(self, packed: list[list[Text]], taps: tuple[int, ...]) -> list[list[Tensor]]:
        width, have = self.hidden_size, self.texts.taps

        def pick(features: Tensor) -> Tensor:
            if taps == have:
                return features
            parts = features.split(width, dim=1)
            return torch.cat([parts[have.index(tap)] for tap in taps], dim=1)

        return [[pick(text.features) for text in row] for row in packed]


def _listed(taps: tuple[int, ...]) -> str:
    return ",".join(map(str, taps))
