"""What must be the same on all ranks: code, model and configuration, each as a digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

import foretell
from foretell.config import EngineConfig
from foretell.drafters import spread_files
from foretell.models.hub import resolve
from foretell.models.loader import open_source

_ENDS = 1 << 20
"""Bytes that are hashed at either end of a model file: the header, and a sample of weights."""
_REMEDIES = {
    "code": "runs other code than rank 0: install the same version of foretell everywhere",
    "torch": "has another version of torch than rank 0: install the same one everywhere",
    "model": "has other model files than rank 0: copy them anew",
    "head": "has other files of the draft head than rank 0: copy them anew",
    "config": "was started with other options than rank 0: give all ranks the same ones",
}


def code_digest() -> str:
    """Of this package's modules."""
    digest = hashlib.sha256(foretell.__version__.encode())
    package = Path(foretell.__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def identity(config: EngineConfig) -> dict[str, str]:
    """This rank's own."""
    names = (
        *("weights", "tensor_parallel", "max_num_seqs", "max_model_len", "page_size"),
        *("speculation", "halves", "device"),
    )
    path = resolve(config.model)
    source, model = open_source(path)
    return {
        "code": code_digest(),
        "torch": torch.__version__,
        "model": _digest(source.files),
        "head": _digest(spread_files(config.speculation, path, model.sizes)),
        "config": str([getattr(config, name) for name in names]),
    }


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """What is wrong with the other one and how to mend it, None if nothing is."""
    for name, remedy in _REMEDIES.items():
        if ours[name] != theirs.get(name):
            return remedy
    return None


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            size = data.seek(0, os.SEEK_END)
            digest.update(f"{file.name} {size}\0".encode())
            for start in (0, max(0, size - _ENDS)):
                data.seek(start)
                digest.update(data.read(_ENDS))
    return digest.hexdigest()
