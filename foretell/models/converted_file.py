"""Converted weights as one file, made once and mapped into memory from then on.

It lies in ``.foretell`` beside the model, or in the cache directory where that cannot be written:
64 bytes that say where the table is and give its digest, tensors on 64-byte borders, and the table
as JSON, which also says what the file was made of. What is damaged, out of date or cannot be
written is made anew. Resident memory is the page cache's, shared by all processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from foretell.models.hub import cache_dir
from foretell.models.tokenizer_file import FOLDER

log = logging.getLogger("foretell")

_START = struct.Struct("<8sQQ32s8x")
"""Mark, offset and size of the table, its SHA-256."""
_MARK = b"foretel1"
_ALIGN = 64
"""Bytes of a cache line and of the widest vector."""
_MADE_BY = (
    *("checkpoint", "config", "convert", "deepseek", "deepseek_config", "gguf", "gguf_header"),
    *("quant", "sharding"),
)
"""Modules that decide what a converted tensor is."""
_ABANDONED = 3600
"""Seconds after which an unfinished file is a killed process's."""

Tensors = Iterable[tuple[str, Tensor]]


def converted(
    model: Path, weights: str, sources: list[Path], convert: Callable[[], Tensors]
) -> Mapping[str, Tensor]:
    """The tensors of a model in a weight format, out of the kept file.

    Args:
        model: a directory or a .gguf file.
        sources: the files that they are made of.
        convert: makes names and tensors, where there is no such file.
    """
    made_of = _made_of(sources)
    places, reason = _places(model, weights), ""
    for place in places:
        if (found := _read(place, made_of)) is not None:
            return found
    for place in places:
        try:
            _write(place, made_of, convert)
        except OSError as error:
            reason = f"{place.parent}: {error.strerror or error}"
        else:
            if (found := _read(place, made_of)) is not None:
                return found
            reason = f"{place}: another process replaced it"
    log.warning("converted weights cannot be kept, each start makes them anew (%s)", reason)
    return dict(convert())


def _places(model: Path, weights: str) -> list[Path]:
    """Where the file may lie, best first."""
    folder, name = (model, "model") if model.is_dir() else (model.parent, model.name)
    name = f"{name}.{weights}.weights"
    which = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]
    return [folder / FOLDER / name, cache_dir() / FOLDER / f"{which}.{name}"]


def _made_of(sources: list[Path]) -> dict[str, Any]:
    """What a kept file depends on."""
    code = hashlib.sha256()
    for module in _MADE_BY:
        code.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    stats = [(file.name, file.stat()) for file in sorted(sources)]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"files": files, "code": code.hexdigest()}


def _read(path: Path, made_of: dict[str, Any]) -> dict[str, Tensor] | None:
    """Tensors that lie in the mapped file; None if it is not there, not whole or out of date."""
    try:
        with path.open("rb") as file:
            mark, offset, size, digest = _START.unpack(file.read(_START.size))
            if mark != _MARK or os.fstat(file.fileno()).st_size != offset + size:
                return None
            file.seek(offset)
            text = file.read(size)
            if hashlib.sha256(text).digest() != digest:
                return None
            table = json.loads(text)
            if table["made_of"] != made_of:
                return None
            # Copy on write, though nobody writes: torch warns of memory that it cannot write.
            mapped = mmap.mmap(file.fileno(), offset, access=mmap.ACCESS_COPY)
    except (OSError, ValueError, struct.error):
        return None
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    for name, (kind, shape, first) in table["tensors"].items():
        dtype = getattr(torch, kind)
        end = first + math.prod(shape) * dtype.itemsize
        found[name] = data[first:end].view(dtype).view(shape)
    return found


def _write(path: Path, made_of: dict[str, Any], convert: Callable[[], Tensors]) -> None:
    """Writes beside the final place, syncs and renames: nobody ever reads half a file, and of two
    processes that write at once the later one's stays.

    Raises:
        OSError: the place cannot be written or is full; nothing is left there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            tensors: dict[str, Any] = {}
            file.write(bytes(_START.size))
            for name, tensor in convert():
                first = _pad(file)
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                tensors[name] = [str(tensor.dtype).removeprefix("torch."), tensor.shape, first]
            offset = _pad(file)
            text = json.dumps({"made_of": made_of, "tensors": tensors}).encode()
            file.write(text)
            file.seek(0)
            digest = hashlib.sha256(text).digest()
            file.write(_START.pack(_MARK, offset, len(text), digest))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _pad(file: BinaryIO) -> int:
    """Goes on to the next border and returns its offset."""
    file.write(bytes(-file.tell() % _ALIGN))
    return file.tell()


def _sweep(path: Path) -> None:
    """Removes what a killed process left unfinished."""
    for part in path.parent.glob("*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED:
                part.unlink()
