"""What tensors a rank holds, in bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor


def storages(root: Any, without: Iterable[Any] = ()) -> dict[int, int]:
    """Memory of all tensors that can be reached from ``root``, by address; a mapped file is one.

    Args:
        without: objects that the way does not lead through.
    """
    seen, left = {id(x) for x in without}, [root]
    found: dict[int, int] = {}
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        else:
            left.extend(gc.get_referents(item))
    return found


def tensors_alive() -> int:
    """Bytes of every tensor in this process."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return sum(storages(tensors).values())
