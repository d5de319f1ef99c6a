"""Files of a run: rows that outlive a kill at any moment, and what tells targets apart."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from foretell.files import named, write_whole
from foretell.models.hub import resolve
from foretell.models.loader import open_source

_SAMPLE = 1 << 20
"""Bytes of a file's start and end that go into its digest: whole files take minutes to read."""


def write_json(path: Path, value: Any) -> None:
    """`write_whole` of readable JSON."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")


class Lines:
    """A JSONL file that grows line by line; what was written outlives the process at once.

    Opening cuts off a last line that a kill left torn, and refuses a second writer.

    Raises:
        ValueError: another process is writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path}: another process is writing to it; wait or stop it") from None
        self._size = sum(len(line) for _, line in read_lines(path))
        self._file.truncate(self._size)

    def append(self, row: dict[str, Any]) -> None:
        """
        Raises:
            OSError: the disk is full; the file ends with the line before.
        """
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        with named(self.path):
            try:
                written = self._file.write(line)
                if written != len(line):  # the rest says why there is no more room
                    self._file.write(line[written:])
            except OSError:
                self._file.truncate(self._size)
                raise
        self._size += len(line)

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        with named(self.path):
            os.fsync(self._file.fileno())
            self._file.close()


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their numbers, counted from 1; a torn last one is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line


def target_digest(model: str) -> str:
    """What tells one target from another: names, sizes, beginnings and ends of its files.

    Raises:
        ValueError: there is no such model.
    """
    source, _ = open_source(resolve(model))
    digest = hashlib.sha256()
    for path in sorted(source.files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
