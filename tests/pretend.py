"""A GPU where there is none: tensors that say that they lie on one, and must be treated so.

They are the CPU's own, so numbers can be compared. What a GPU would not let pass raises: operands
in different places, addresses and numpy. What makes the host wait for it is counted (`waits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from foretell.runtime.stream import Inline

GPU = torch.device("cuda", 0)
waits: Counter[str] = Counter()
"""How often the host had to wait for it, by function: numbers that it asked for, or how many a mask
picks, and what it sent otherwise than by `foretell.placed.put`."""
_READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"}
_FORBIDDEN = {"numpy", "data_ptr", "__array__"}
_INDEXING = {"__getitem__", "__setitem__"}
"""Of what lies on a GPU by numbers of the host, too."""
_raw = torch._C.DisableTorchFunctionSubclass


class OnGpu(Tensor):
    """A tensor that lies on the GPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


def _call(func, args, kwargs):
    name = (resolve_name(func) or getattr(func, "__name__", "")).removesuffix(".__get__")
    name = name.rpartition(".")[2]
    operands = [*_tensors(args), *_tensors(kwargs.values())]
    there = [x for x in operands if isinstance(x, OnGpu)]
    if there and name in ("device", "is_cpu", "is_cuda"):
        return {"device": GPU, "is_cpu": False, "is_cuda": True}[name]
    if there and name in _FORBIDDEN:
        raise TypeError(f"{name} of a tensor on a GPU")
    if name == "pin_memory":
        return args[0]
    kwargs.pop("pin_memory", None)
    args, kwargs, goes = _placed(name, args, kwargs)
    away, soon = goes is not None and goes.type == "cpu", kwargs.get("non_blocking")
    sent = goes is not None and goes.type == "cuda" and name in ("to", "tensor", "as_tensor")
    picked = name in _INDEXING and isinstance(args[0], OnGpu) and _picks(args[1])
    read = there and (name in _READS or name == "cpu" or (away and not soon))
    if read or picked or (sent and not there and not soon):
        waits[name] += 1
    mixed = [x for x in operands if not isinstance(x, OnGpu) and x.ndim]
    if name in _INDEXING and isinstance(args[0], OnGpu):
        mixed = []
    if there and mixed and name not in ("copy_", "to"):
        raise RuntimeError(f"{name}: operands on the CPU and on a GPU")
    with _raw():
        out = func(*_map(_plain, args), **_map(_plain, kwargs))
    if name in ("cpu", "tolist") or away:
        return _map(_plain, out)
    if name == "copy_" and not isinstance(args[0], OnGpu):
        return args[0]
    lies = there or (goes is not None and goes.type == "cuda")
    return _map(lambda x: x.as_subclass(OnGpu), out) if lies else out


def _placed(name, args, kwargs):
    """Arguments with the CPU in place of the GPU, and the device that they name."""
    goes = kwargs.get("device")
    if name == "to" and len(args) > 1 and isinstance(args[1], torch.device | str):
        goes, args = args[1], (args[0], torch.device("cpu"), *args[2:])
    elif name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
        goes = GPU if isinstance(args[1], OnGpu) else torch.device("cpu")
    goes = torch.device(goes) if goes is not None else None
    if goes is not None and "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    return args, kwargs, goes


def _picks(index) -> bool:
    """Does an index hold numbers of the host, or a mask?"""
    if isinstance(index, tuple):
        return any(map(_picks, index))
    if isinstance(index, Tensor):
        return not isinstance(index, OnGpu) or _plain(index).dtype == torch.bool
    return isinstance(index, list)


def _tensors(values) -> list[Tensor]:
    out: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            out.append(value)
        elif isinstance(value, list | tuple):
            out += _tensors(value)
    return out


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


def _map(change, value):
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(change, each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(change, each) for each in value)
    if isinstance(value, tuple):  # torch's named results
        return type(value)([_map(change, each) for each in value])
    return value


class _Everywhere(TorchFunctionMode):
    """For what has no operand on the GPU, but makes one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _call(func, args, dict(kwargs or {}))


@contextmanager
def gpu(monkeypatch) -> Iterator[None]:
    """Within it there is one; its work is done on the caller's thread, when its result is asked
    for."""
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device: "pretended",
        "set_device": lambda device: None,
        "mem_get_info": lambda device: (1 << 30, 1 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("foretell.runtime.runner.stream_on", lambda device: Inline())
    with _Everywhere():
        yield
