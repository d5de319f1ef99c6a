"""Files and directories that are whole, or not there: nobody ever reads half of one, whatever kills
its writer."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of writing say which file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside the final place, syncs and renames. Pipes and devices are written to.

    Raises:
        OSError: the place cannot be written or is full; what was there before still is.
    """
    special = path.exists() and not path.is_file()
    part = path if special else path.with_name(f".{path.name}.{os.getpid()}.part")
    with named(path):
        try:
            if not special:
                path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                if not special:
                    os.fsync(file.fileno())
            if not special:
                part.replace(path)
        finally:
            if not special:
                part.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new directory to fill, which is synced and takes the place of ``path``; where that fails,
    the former one stays.

    Raises:
        OSError: it cannot be written or the disk is full.
    """
    part, old = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "removed"))
    shutil.rmtree(part, ignore_errors=True)  # a killed process's
    try:
        part.mkdir(parents=True)
        yield part
        for root, _, names in os.walk(part):
            for each in (*(Path(root, name) for name in names), Path(root)):
                sync(each)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        try:
            part.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        sync(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes a file, or the names in a directory, outlast a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def alone(directory: Path) -> TextIO:
    """A lock on a directory, held until the file that is returned is closed or the process ends.

    Raises:
        ValueError: another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"{directory}: another process writes there; wait or stop it") from None
    return file


def sha256(path: Path) -> str:
    """Of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
