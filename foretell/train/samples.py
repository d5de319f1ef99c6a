"""Texts that a head learns from, as rows of JSONL: token ids and which of them are answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretell.train.files import read_lines


@dataclass(frozen=True, eq=False)
class Sample:
    """One text. Tokens behind the last span ask for an answer that is not there yet."""

    tokens: np.ndarray  # [T] int32
    spans: tuple[tuple[int, int], ...]
    """Starts and ends of the assistant's tokens, its end-of-turn tokens included, in order. An
    empty one stands where an answer belongs."""
    source: str = ""
    index: int = -1
    """Row of samples.jsonl, counted from 0."""
    given: bool = False
    """A text that nobody asks for: the target's law over all of it is the lesson."""

    @property
    def num_wanted(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def wanted(self) -> np.ndarray:
        """[T] bool: part of an answer."""
        mask = np.zeros(len(self.tokens), dtype=bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    def cut(self, length: int) -> Sample:
        """Its first ``length`` tokens."""
        if len(self.tokens) <= length:
            return self
        spans = tuple((start, min(end, length)) for start, end in self.spans if start < length)
        return replace(self, tokens=self.tokens[:length], spans=spans)

    def as_row(self) -> dict[str, Any]:
        row = {"tokens": self.tokens.tolist(), "spans": self.spans, "source": self.source}
        return row | {"given": True} if self.given else row


def texts_of(run: Path) -> Path:
    """The answers of a run, or its prompts as they were prepared.

    Raises:
        ValueError: there are neither.
    """
    for name in ("answers.jsonl", "samples.jsonl"):
        if (run / name).exists():
            return run / name
    raise ValueError(f"{run / name} is missing: make it with foretell train prepare --run {run}")


def read_samples(path: Path, vocab_size: int) -> Iterator[Sample]:
    """Rows in the order of the file; a torn last line is left out.

    Raises:
        ValueError: a row is not one, by its line.
    """
    row = -1
    for number, line in read_lines(path):
        row += 1
        try:
            yield _sample(json.loads(line), vocab_size, row)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path}:{number}: not a row of token ids and spans ({what}); make the file again"
            ) from None


def _sample(row: Any, vocab_size: int, index: int) -> Sample:
    tokens = np.array(row["tokens"], dtype=np.int32)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError("tokens must be a list of ids")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"ids must be from 0 to {vocab_size - 1}")
    spans = tuple((int(start), int(end)) for start, end in row["spans"])
    last = 0
    for start, end in spans:
        if not last <= start <= end <= len(tokens):
            raise ValueError(f"span {start} to {end} of {len(tokens)} tokens")
        last = end
    source, place = str(row.get("source", "")), int(row.get("index", index))
    return Sample(tokens, spans, source, place, given=row.get("given") is True)
