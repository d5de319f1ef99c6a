"""What a run says about itself: sums over tokens and rows of metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from foretell.files import write_whole
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


@contextmanager
def metrics_file(directory: Path, step: int) -> Iterator[Callable[[Row], None]]:
    """Yields what writes a row to metrics.jsonl, and to TensorBoard's event files where that
    package is installed.

    Args:
        step: rows of later steps are dropped: they are made again.
    """
    path, board = directory / "metrics.jsonl", None
    kept = [row for row in read_rows(path) if row["step"] <= step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
    if find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def write(row: Row) -> None:
        file.write(json.dumps(row) + "\n")
        file.flush()
        if board is not None:
            for name, value in _flat(row).items():
                board.add_scalar(name, value, row["step"])

    with path.open("a") as file:
        yield write
    if board is not None:
        board.close()


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


def brief(row: Row) -> str:
    """Loss and, where the scheme counts it, acceptance by draft position."""
    agreed = " ".join(f"{share:.2f}" for share in row.get("agreed", ())[:4])
    return f"loss {row['loss']:.3f}" + (f"  accept {agreed}" if agreed else "")


def span(seconds: float) -> str:
    """Seconds as people say them: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
