"""What a run says about itself: sums over tokens, rows of metrics.jsonl, a bar."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from foretell.spec.training import Loss, TrainingBatch
from foretell.train.parallel import Ranks

Row = dict[str, Any]


class Tally:
    """Sums over the wanted tokens of batches, as lists of float64."""

    def __init__(self, sums: dict[str, list[float]] | None = None) -> None:
        self.sums: dict[str, list[float]] = dict(sums or {})

    def add(self, batch: TrainingBatch, loss: Loss) -> float:
        """Adds one batch's. Waits for the device. Returns its loss, a sum."""
        values = {"tokens": batch.num_wanted, "loss": loss.total}
        values |= {f"parts.{name}": part for name, part in loss.parts.items()}
        for name in ("agreed", "matched", "counted"):
            if (value := getattr(loss, name)) is not None:
                values[name] = value
        flat = torch.cat([v.detach().reshape(-1).double() for v in values.values()]).tolist()
        total = 0.0
        for name, value in values.items():
            own, flat = flat[: value.numel()], flat[value.numel() :]
            self._put(name, own)
            total = own[0] if name == "loss" else total
        return total

    def merge(self, other: Tally) -> None:
        for name, values in other.sums.items():
            self._put(name, values)

    def over(self, ranks: Ranks) -> Tally:
        """The sums of all ranks, which must have the same names."""
        names = sorted(self.sums)
        sizes = [len(self.sums[name]) for name in names]
        flat = [value for name in names for value in self.sums[name]]
        parts = ranks.sum(torch.tensor(flat, dtype=torch.float64)).split(sizes)
        return Tally({name: part.tolist() for name, part in zip(names, parts, strict=True)})

    def _put(self, name: str, values: list[float]) -> None:
        old = self.sums.get(name, [0.0] * len(values))
        self.sums[name] = [a + b for a, b in zip(old, values, strict=True)]

    @property
    def tokens(self) -> int:
        return int(self.sums.get("tokens", [0.0])[0])

    @property
    def loss(self) -> float:
        """Mean over the tokens."""
        return self.sums.get("loss", [0.0])[0] / max(1, self.tokens)

    def means(self) -> Row:
        """loss, parts, and agreed and matched by draft position, as means over tokens."""
        parts = {
            name.removeprefix("parts."): values[0] / max(1, self.tokens)
            for name, values in self.sums.items()
            if name.startswith("parts.")
        }
        row: Row = {"loss": self.loss, "parts": parts}
        for name in ("agreed", "matched"):
            if name in self.sums:
                counted = self.sums.get("counted") or [float(self.tokens)] * len(self.sums[name])
                pairs = zip(self.sums[name], counted, strict=True)
                row[name] = [value / max(1.0, count) for value, count in pairs]
        return row


class Metrics:
    """fit/metrics.jsonl, and TensorBoard's event files where that package is installed.

    Args:
        step: rows of later steps are dropped: they are made again.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self.path = directory / "metrics.jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_rows(self.path) if row["step"] <= step]
        temporary = self.path.with_suffix(".partial")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, self.path)
        self._file = self.path.open("a")
        self._board: Any = None
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _flat(row).items():
                self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; from a line that is none, such as a last one that a killed
    process left unfinished, nothing is read."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or "loss" not in row:
            break
        rows.append(row)
    return rows


def _flat(row: Row, prefix: str = "") -> dict[str, float]:
    out: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            out |= {f"{prefix}{name}/{i + 1}": each for i, each in enumerate(value)}
        else:
            out[f"{prefix}{name}"] = value
    return out


class Display:
    """A bar with the time left on a terminal; elsewhere a line at most every ten seconds."""

    def __init__(self, total: int, step: int, *, shown: bool = True) -> None:
        self.total, self.first, self.step = total, step, step
        self.shown = shown
        self._start = self._said = time.monotonic()
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("fit"), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.description}"), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task("", total=total, completed=step)
            self._bar.start()

    def say(self, step: int, row: Row) -> None:
        """After a step; ``row`` holds loss and, where the scheme counts it, agreed."""
        self.step = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._text(row))
        elif self.shown and (time.monotonic() - self._said > 10 or step == self.total):
            self._said = time.monotonic()
            print(f"fit {step}/{self.total}  {self._text(row)}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def _text(self, row: Row) -> str:
        each = (time.monotonic() - self._start) / max(1, self.step - self.first)
        words = [f"loss {row['loss']:.3f}"]
        if row.get("agreed"):
            words.append("accept " + " ".join(f"{a:.2f}" for a in row["agreed"][:4]))
        words.append(f"{span((self.total - self.step) * each)} left at {each:.2f} s a step")
        return "  ".join(words)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def span(seconds: float) -> str:
    """Seconds as people say them: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
