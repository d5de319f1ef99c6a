"""Tensors on disk, each accounted for: none missing, none left over, none of another shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers of old checkpoints that follow from the config."""

_SCALE = "_scale_inv"
"""Behind a matrix's name: what each of its blocks is to be multiplied by."""
FP8_BLOCK = 128
"""Rows and columns of a block of 8-bit floats that share a scale."""


class Cut(NamedTuple):
    """Part of a tensor: ``start`` to ``stop`` of its dimension ``axis``."""

    axis: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.axis, self.start, self.stop - self.start)


class Source(Protocol):
    """A file or directory of tensors under Hugging Face's names."""

    path: Path
    files: list[Path]
    """All that tensors and their shapes come from."""
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """The tensor in any float dtype, or a part of it: no more is read then."""
        ...


class Placed:
    """A source whose floats come onto a device."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device = source, device
        self.path, self.files, self.shapes = source.path, source.files, source.shapes

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """See `Source.read`."""
        tensor = self._source.read(name, cut)
        return tensor.to(self._device) if tensor.is_floating_point() else tensor


class Checkpoint:
    """Hands out each tensor once, and says in the end what nobody asked for."""

    def __init__(self, source: Source) -> None:
        self._source, self.path = source, source.path
        self._left = {name for name in source.shapes if not _IGNORED.fullmatch(name)}

    def __contains__(self, name: str) -> bool:
        return name in self._source.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.shapes)

    def narrow(self, cut: Callable[[Source], Source]) -> None:
        """Hands out parts of what is left from now on, and not what has no part there."""
        self._source = cut(self._source)
        self._left &= self._source.shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """
        Raises:
            ValueError: the tensor is missing.
        """
        if name not in self._source.shapes:
            raise ValueError(f"{self._source.path}: tensor {name} is missing")
        return self._source.shapes[name]

    def skip(self, name: str) -> None:
        """Leaves a tensor out on purpose; it need not be there."""
        self._left.discard(name)

    def take(self, name: str, *shape: int) -> Tensor:
        """Reads one tensor.

        Raises:
            ValueError: it is missing, has another shape or does not hold finite floats.
        """
        tensor = self.take_any(name, *shape)
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ValueError(
                f"{self._source.path}: tensor {name} is {tensor.dtype}; "
                "only float32, float16 and bfloat16 checkpoints load, or a GGUF file"
            )
        if not tensor.isfinite().all():
            raise ValueError(
                f"{self._source.path}: tensor {name} holds NaN or infinity; the file is damaged or "
                "its training failed: get another copy"
            )
        return tensor

    def take_any(self, name: str, *shape: int) -> Tensor:
        """Reads one tensor of any dtype.

        Raises:
            ValueError: it is missing or has another shape.
        """
        if (have := self.shape(name)) != shape:
            raise ValueError(
                f"{self._source.path}: tensor {name} has shape {list(have)}, "
                f"but the model's config makes it {list(shape)}"
            )
        assert name in self._left, f"{name} is read twice"
        self._left.remove(name)
        return self._source.read(name)

    def finish(self) -> None:
        """
        Raises:
            ValueError: a tensor was never taken.
        """
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{self._source.path}: the model's config has no place for tensor "
                f"{', '.join(names[:3])}{more}"
            )


class Safetensors:
    """One .safetensors file, or a directory with one or with shards and their index. Matrices of
    8-bit floats with a ``weight_scale_inv`` (DeepSeek-V3, 2412.19437, section 3.3.2) are read as
    what they stand for.

    Raises:
        ValueError: no such files, a file that is cut short, a tensor in two shards, or an index
            that names what no shard holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Path] = {}
        self._scales: dict[str, tuple[int, ...]] = {}
        self._open: tuple[Path, Any] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = path / "model.safetensors.index.json"
        named: set[str] = set()
        if index.exists():
            places = read_json(index).get("weight_map", {})
            if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
                raise ValueError(f"{index}: weight_map must give each tensor a file name")
            named, shards = set(places), sorted(set(places.values()))
            files = [path / shard for shard in shards]
        elif (path / "model.safetensors").exists():
            files = [path / "model.safetensors"]
        else:
            files = sorted(path.glob("*.safetensors"))
            if len(files) > 1:
                raise ValueError(f"{path}: several .safetensors files but no {index.name}")
        if not files:
            raise ValueError(f"{path}: no .safetensors file here; convert the checkpoint first")
        self.files = [path / "config.json", *files]
        for file in files:
            self._scan(file)
        if missing := sorted(named - set(self.shapes)):
            raise ValueError(f"{path}: the index names tensor {missing[0]}, which no shard holds")
        for name in [name for name in self.shapes if name.removesuffix(_SCALE) in self._files]:
            if name.endswith(_SCALE):  # a part of its matrix
                self._scales[name.removesuffix(_SCALE)] = self.shapes.pop(name)

    def _scan(self, file: Path) -> None:
        handle = self._handle(file)
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            if name in self._files:
                raise ValueError(
                    f"{self.path}: tensor {name} is in {self._files[name].name} and in {file.name}"
                )
            self._files[name] = file
            self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def _handle(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != file:
            try:
                self._open = (file, safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: not a complete safetensors file ({error})") from None
        return self._open[1]

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """
        Raises:
            ValueError: scales that do not fit their matrix.
        """
        handle, shape = self._handle(self._files[name]), self.shapes[name]
        where = [slice(0, size) for size in shape]
        if cut is None:
            tensor = handle.get_tensor(name)
        else:
            where[cut.axis] = slice(cut.start, cut.stop)
            tensor = handle.get_slice(name)[tuple(where)]
        if name not in self._scales:
            return tensor
        scale = self._handle(self._files[name + _SCALE]).get_tensor(name + _SCALE).float()
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        if tensor.element_size() != 1 or not tensor.is_floating_point() or scale.shape != blocks:
            raise ValueError(
                f"{self.path}: {name} is {tensor.dtype} {list(shape)} with scales "
                f"{list(scale.shape)}; scales are for 8-bit floats in blocks of {FP8_BLOCK}"
            )
        for axis, part in enumerate(where):
            places = torch.arange(part.start, part.stop) // FP8_BLOCK
            scale = scale.index_select(axis, places)
        return tensor.float() * scale


class TorchFile:
    """A state dict that torch.save wrote. Only tensors are read, never code.

    Raises:
        ValueError: not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, [path]
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._tensors = {name: tensor for name, tensor in state.items() if tensor is not None}
            self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        except Exception as error:  # zip, pickle, attribute errors: whatever the file holds
            reason = str(error).split("\n")[0]
            if reason.startswith("Weights only load failed"):  # torch would say how to run its code
                reason = "it holds other Python objects, which are never loaded"
            raise ValueError(f"{path}: not a complete state dict of tensors ({reason})") from None

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        tensor = self._tensors[name]
        return tensor if cut is None else cut.of(tensor)


class Part:
    """Those tensors of a source whose names begin with a prefix."""

    def __init__(self, source: Source, prefix: str) -> None:
        self.path, self.files = source.path, source.files
        self.shapes = {n: shape for n, shape in source.shapes.items() if n.startswith(prefix)}
        self.read = source.read


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: the file is missing or not a JSON object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must be a JSON object, not {type(settings).__name__}")
    return settings


def join(parts: list[Tensor]) -> Tensor:
    """Tensors over each other in one float dtype, for fused products."""
    dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else torch.float32
    return torch.cat([part.to(dtype) for part in parts])
