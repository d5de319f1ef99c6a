"""The header of a GGUF file: its metadata and where its tensors lie, without their data.

The layout is that of the specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. The
long lists of a vocabulary are passed over and read only when asked for.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Value type to struct's code; 8 is a string, 9 an array."""
_STRING, _ARRAY = 8, 9
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2),  # F32, F16, BF16
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),  # Q4_0 Q4_1 Q5_0 Q5_1 Q8_0
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),  # Q2_K .. Q6_K
}  # fmt: skip
"""Tensor type to numbers in a block and bytes of a block."""
_MAX_DIMS = 4


@dataclass(frozen=True)
class Array:
    """A list in the metadata, not read yet."""

    kind: int
    """Type of its values."""
    count: int
    start: int
    """First byte of the first value."""


@dataclass(frozen=True)
class Entry:
    """A tensor in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    kind: int
    """GGML's number of its type."""
    start: int
    """First byte in the file."""
    num_bytes: int


class Header:
    """What a GGUF file says of itself.

    Raises:
        ValueError: not a GGUF file, of another version or byte order, damaged, or shorter than its
            tensors are.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version:#x}; versions 2 and 3, little-endian, can be read")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        """Numbers, texts and `Array` by key."""
        for _ in range(num_values):
            key = self._text()
            if key in self.metadata:
                raise ValueError(f"key {key} is there twice")
            self.metadata[key] = self._value(self._scalar("I"))
        found = [self._entry() for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment is {align!r}")
        start = -(-self._at // align) * align
        self.tensors = [
            Entry(name, shape, kind, start + offset, _num_bytes(name, shape, kind))
            for name, shape, kind, offset in found
        ]
        for tensor in self.tensors:
            if tensor.start + tensor.num_bytes > len(self.data):
                raise ValueError(f"the file ends before tensor {tensor.name} does")

    def values(self, array: Array) -> list[Any]:
        """Reads a list of the metadata; texts come as bytes."""
        self._at = array.start
        if array.kind == _STRING:
            return [self._bytes(self._scalar("Q")) for _ in range(array.count)]
        code = f"<{array.count}{_SCALARS[array.kind]}"
        return list(struct.unpack(code, self._bytes(struct.calcsize(code))))

    def tensor_data(self, tensor: Entry) -> np.ndarray:
        """A tensor's bytes: [rows.., bytes of a row] uint8, over the file itself."""
        raw = np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.start)
        return raw.reshape(*tensor.shape[:-1], -1)

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self._at:
            raise ValueError("it ends within its header")
        self._at += count
        return self.data[self._at - count : self._at]

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack(f"<{code}", self._bytes(size))[0]

    def _text(self) -> str:
        return self._bytes(self._scalar("Q")).decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> Array:
        kind, count = self._scalar("I"), self._scalar("Q")
        array = Array(kind, count, self._at)
        if kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            length = struct.Struct("<Q").unpack_from  # a loop over a whole vocabulary: kept short
            at, end = self._at, len(self.data) - 8
            for _ in range(count):
                if at > end:
                    raise ValueError("it ends within its header")
                at += 8 + length(self.data, at)[0]
            self._skip(at - self._at)
        else:
            raise ValueError(f"lists of value type {kind} are not supported")
        return array

    def _skip(self, count: int) -> None:
        if count > len(self.data) - self._at:
            raise ValueError("it ends within its header")
        self._at += count

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")


def _num_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    if kind in _BLOCKS:
        numbers, size = _BLOCKS[kind]
    else:  # a type so rare that its package may be imported for it
        import gguf

        try:
            numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ValueError(f"tensor {name} has the unknown type {kind}") from None
    if min(shape) < 1 or shape[-1] % numbers:
        raise ValueError(f"tensor {name} has the shape {list(shape)}")
    total = 1
    for dim in shape:
        total *= dim
    return total // numbers * size
