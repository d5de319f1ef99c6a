"""Reading heads that a test has written, changed or spoilt, for the tiny target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.models.head_formats import LoadedHead, load_eagle, load_eagle3
from foretell.models.mtp_formats import load_mtp
from tests import heads, tiny

LOADERS = {"eagle": load_eagle, "eagle3": load_eagle3, "mtp": load_mtp}
Head = tuple[heads.Tensors, dict[str, Any]]


def target():
    return tiny.model("f32")


def read(method: str, head: Head, path: Path, **options: Any) -> LoadedHead:
    return LOADERS[method](heads.write(*head, path), target(), "f32", **options)


def without(head: Head, *names: str) -> Head:
    return {n: t for n, t in head[0].items() if n not in names}, head[1]


def renamed(head: Head, old: str, new: str) -> Head:
    return {n.replace(old, new): t for n, t in head[0].items()}, head[1]


def some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def x(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
