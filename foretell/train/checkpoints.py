"""Checkpoints of a run: directories that are whole, or not there.

One is written under a hidden name, synced and renamed. A process that is killed while it writes
leaves a hidden directory, which the next one sweeps; the former checkpoints are untouched.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foretell.files import replacing

_NAME = re.compile(r"step-(\d{8,})")
_STATE, _SETTINGS = "state.pt", "settings.json"


class Checkpoints:
    """The newest ``keep`` checkpoints in a directory, named step-00000500 and so on.

    Only one process of a run writes; any may read.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path = path
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps that a checkpoint is there for, ascending."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(each.name) for each in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def directory(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def save(
        self,
        step: int,
        state: dict[str, Any],
        settings: dict[str, Any],
        more: Callable[[Path], None] = lambda path: None,
    ) -> Path:
        """Writes a checkpoint and drops the oldest ones.

        Args:
            state: tensors, numbers, strings, lists and dicts.
            settings: what made the run, as JSON; `load` compares it.
            more: writes further files into the directory that it is given.

        Raises:
            OSError: the disk is full or read-only; the former checkpoints are as they were.
        """
        self.sweep()
        final = self.directory(step)
        with replacing(final) as part:
            torch.save(state, part / _STATE)
            (part / _SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
            more(part)
        for old in self.steps()[: -self.keep]:
            self._drop(old)
        return final

    def load(self, step: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Reads a checkpoint's state onto the CPU.

        Raises:
            ValueError: it was made with other settings, which the message names; or it is damaged.
        """
        path = self.directory(step)
        try:
            saved = json.loads((path / _SETTINGS).read_text())
            state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read ({str(error).splitlines()[0]}): remove that directory to "
                "go on from the checkpoint before it"
            ) from None
        now = json.loads(json.dumps(settings))
        changed = [
            f"{name} was {saved.get(name)!r} and is {now.get(name)!r}"
            for name in sorted(saved.keys() | now.keys())
            if saved.get(name) != now.get(name)
        ]
        if changed:
            raise ValueError(
                f"{path} is of another run: {'; '.join(changed)}. "
                "Use the former settings, another --run, or --restart to begin anew"
            )
        return state

    def clear(self) -> None:
        """Removes all checkpoints, and the head that came of them."""
        for step in self.steps():
            self._drop(step)
        shutil.rmtree(self.path / "head", ignore_errors=True)
        self.sweep()

    def sweep(self) -> None:
        """Removes what killed processes left half written or half removed."""
        for each in self.path.glob(".step-*"):
            shutil.rmtree(each, ignore_errors=True)

    def _drop(self, step: int) -> None:
        """Renames first: a half removed checkpoint must not look like a whole one."""
        hidden = self.path / f".step-{step:08d}.removed"
        self.directory(step).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
