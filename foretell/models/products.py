"""Compiled matrix products: rows are fitted, then panels are handed out to threads.

Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from foretell.attention.code import WIDE
from foretell.attention.jit import callback, carray, intrinsic, jit
from foretell.attention.together import LINE, fetch_add, meet
from foretell.config import Weights
from foretell.models.dots import width as number_bytes
from foretell.models.fitting import fit
from foretell.models.quant import GROUP, PANEL, TURNED
from foretell.models.tiles import LIKE, SIZES, group_of, tile

PIECE = 2
"""Panels handed out at once; a thread asks for the next before it does its own."""
_SOME, _ROWS = 8, 32
"""From so many rows on, single panels are handed out, and of each so many rows."""
_A, _B, _C, _D = SIZES
_tile_a, _tile_b, _tile_c, _tile_d = (tile(rows, min(1, rows - 1) if WIDE else 2) for rows in SIZES)
SYNC = 3 * LINE
"""Bytes that `product` needs to keep its threads together."""


@intrinsic
def float_at(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@jit()
def floats(address: Any, count: Any) -> Any:
    """`count` float32 at an address, as an array."""
    return carray(float_at(address), (count,))


def row_bytes(kind: Weights, padded: int) -> int:
    """Bytes of a fitted row, whole cache lines."""
    extras = padded // GROUP[kind] * 8 if kind in ("int8", "int4") else 0
    return (padded * number_bytes(kind) + extras + 63) // 64 * 64


@jit()
def _fit_row(like: Any, x: Any, first: Any, end: Any, row: Any, padded: Any) -> None:
    """Fits inputs first .. end - 1 of a row at address x into the fitted row at address `row`;
    `first` starts a group, `end` ends one or the row. like: the format, an array of `LIKE`."""
    group = group_of(like)
    whole = first + (end - first) // group * group
    if whole > first:
        fit(like, x, row, first, whole, padded)
    if whole < end:
        rest = np.zeros(group, np.float32)
        rest[: end - whole] = floats(x + 4 * whole, end - whole)
        fit(like, rest.ctypes.data - 4 * whole, row, whole, whole + group, padded)


@jit()
def _multiply(
    like: Any, x: Any, stride: Any, rows: Any, weights: Any, padded: Any, panel: Any, panels: Any,
    scale: Any, bias: Any, out: Any, width: Any, counter: Any,
) -> None:  # fmt: skip
    """The product of fitted rows with a matrix, as much of it as this thread gets.

    Args:
        like: the format, an array of `LIKE`.
        x: address of the rows, `stride` bytes apart.
        weights: address of panels of `panel` bytes each, with K `padded` inputs.
        scale: address of the outputs' scales, and bias likewise.
        out: address of the outputs; rows are `width` items apart.
        counter: address of an int64 that counts what was handed out.
    """
    block = _D
    if WIDE:
        block = 8 if rows >= 16 else (4 if rows >= 8 else 2)
    # Few rows wait for memory, of which two panels in a row are read best. Many take long: small
    # pieces leave no thread without work.
    num = PIECE if rows < _SOME else 1
    parts = (rows + _ROWS - 1) // _ROWS
    count = panels * parts
    start = fetch_add(counter, num)
    while start < count:
        following = fetch_add(counter, num)
        end = min(start + num, count)
        for item in range(start, end):
            p, row = item // parts, item % parts * _ROWS
            w, at = weights + p * panel, 4 * PANEL * p
            s, b, y = scale + at, bias + at, out + at
            after = item + 1 if item + 1 < end else following
            after = weights + min(after // parts, panels - 1) * panel
            stop = min(row + _ROWS, rows)
            while row < stop:
                size = min(block, stop - row)
                # Two blocks at a time, each of which fetches half of the panel that comes next:
                # one that fetches all of it is slower than none that does. Narrow tiles are slow
                # enough: the first fetches it all.
                half = row // block % 2 * panel // 2
                ask = after + half if WIDE else (w if row else after)
                z, r = y + 4 * row * width, x + row * stride
                if size >= _D:
                    size = _D
                    _tile_d(like, r, stride, w, padded, s, b, z, width, ask)
                elif size >= _C:
                    size = _C
                    _tile_c(like, r, stride, w, padded, s, b, z, width, ask)
                elif size >= _B:
                    size = _B
                    _tile_b(like, r, stride, w, padded, s, b, z, width, ask)
                else:
                    _tile_a(like, r, stride, w, padded, s, b, z, width, ask)
                row += size
        start = following


@intrinsic
def _words_at(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], ir.IntType(32).as_pointer())

    return types.CPointer(types.uint32)(types.int64), generate


@jit()
def _read_row(
    like: Any, weights: Any, panel: Any, padded: Any, scales: Any, row: Any, width: Any, out: Any
) -> None:
    """A row of a matrix (not int4), the inverse of packing: as `PackedEmbedding` in torch."""
    steps = padded * like.itemsize // 4
    start = weights + row // PANEL * panel + row % PANEL // 16 * 64 + row % 16 * 4
    words = carray(_words_at(start), (32 * (steps - 1) + 1,))
    values = np.empty(padded, np.float32)
    scale = floats(scales + 4 * row, 1)[0]
    for step in range(steps):
        word = words[32 * step]
        if like.itemsize == 1:
            for i in range(4):
                level = np.int32((word >> np.uint32(8 * i)) & np.uint32(255)) - np.int32(128)
                values[4 * step + i] = np.float32(level) * scale
        elif like.itemsize == 2:
            values[2 * step] = np.uint32(word << np.uint32(16)).view(np.float32)
            values[2 * step + 1] = np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32)
        else:
            values[step] = np.uint32(word).view(np.float32)
    if like.itemsize == 1:
        half = 1
        while half < TURNED:
            for first in range(0, padded, 2 * half):
                for i in range(first, first + half):
                    low, high = values[i], values[i + half]
                    values[i], values[i + half] = low + high, low - high
            half *= 2
    floats(out, width)[:] = values[:width]


class Format(NamedTuple):
    """Addresses of a format's functions: other compiled code calls them without knowing which
    format it is, and need not be compiled again for each."""

    fit: int  # `_fit_row` without `like`
    multiply: int  # `_multiply` without `like`
    read_row: int  # `_read_row` without `like`


@functools.cache
def compile_format(kind: Weights) -> Format:
    """Compiles a format's functions, or fetches them from numba's cache."""
    like = LIKE[kind]

    @callback(types.void(*[types.int64] * 5))
    def fit(x: Any, first: Any, end: Any, row: Any, padded: Any) -> None:
        _fit_row(like, x, first, end, row, padded)

    @callback(types.void(*[types.int64] * 12))
    def multiply(
        x: Any, stride: Any, rows: Any, weights: Any, padded: Any, panel: Any, panels: Any,
        scale: Any, bias: Any, out: Any, width: Any, counter: Any,
    ) -> None:  # fmt: skip
        _multiply(
            like, x, stride, rows, weights, padded, panel, panels, scale, bias, out, width, counter
        )

    @callback(types.void(*[types.int64] * 7))
    def read(
        weights: Any, panel: Any, padded: Any, scales: Any, row: Any, width: Any, out: Any
    ) -> None:
        _read_row(like, weights, panel, padded, scales, row, width, out)

    return Format(fit.address, multiply.address, read.address)


def _call(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
    """Calls the function at the address that comes first with all that follows."""
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in arguments[1:]])
    b.call(b.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
    return context.get_dummy_value()


@intrinsic
def fit_row(typing: Any, address: Any, x: Any, first: Any, end: Any, row: Any, padded: Any) -> Any:
    """`_fit_row` of the format whose function lies at an address."""
    return types.void(*[types.int64] * 6), _call


@intrinsic
def multiply(
    typing: Any, address: Any, x: Any, stride: Any, rows: Any, weights: Any, padded: Any,
    panel: Any, panels: Any, scale: Any, bias: Any, out: Any, width: Any, counter: Any,
) -> Any:  # fmt: skip
    """`_multiply` of the format whose function lies at an address."""
    return types.void(*[types.int64] * 13), _call


@intrinsic
def read_row(
    typing: Any, address: Any, weights: Any, panel: Any, padded: Any, scales: Any, row: Any,
    width: Any, out: Any,
) -> Any:  # fmt: skip
    """`_read_row` of the format whose function lies at an address."""
    return types.void(*[types.int64] * 8), _call


@jit(types.void(*[types.int64] * 18))
def product(
    fit: Any, run: Any, x: Any, inputs: Any, rows: Any, fitted: Any, stride: Any, weights: Any,
    padded: Any, panel: Any, panels: Any, scale: Any, bias: Any, out: Any, width: Any, sync: Any,
    share: Any, shares: Any,
) -> None:  # fmt: skip
    """One product on its own. x: address of [R, inputs] float32; sync: of `SYNC` bytes, zero."""
    for row in range(share, rows, shares):
        fit_row(fit, x + 4 * row * inputs, 0, inputs, fitted + row * stride, padded)
    meet(sync, shares)
    multiply(
        run, fitted, stride, rows, weights, padded, panel, panels, scale, bias, out, width,
        sync + 2 * LINE,
    )  # fmt: skip
    meet(sync, shares)
