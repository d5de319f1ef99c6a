"""Compiled matrix products: rows are fitted, then panels are handed out to threads.

Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from foretell.attention.kernels import FLAGS
from foretell.attention.together import LINE, fetch_add, meet
from foretell.config import Weights
from foretell.models.quant import GROUP, PANEL
from foretell.models.tiles import LIKE, fit, group_of, tile

_PIECE = 4
"""Panels handed out at once."""
_tile1, _tile2, _tile4, _tile8 = (tile(rows) for rows in (1, 2, 4, 8))
SYNC = 3 * LINE
"""Bytes that `product` needs to keep its threads together."""


@intrinsic
def float_at(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@njit(**FLAGS)
def floats(address: Any, count: Any) -> Any:
    """`count` float32 at an address, as an array."""
    return carray(float_at(address), (count,))


def row_bytes(kind: Weights, padded: int) -> int:
    """Bytes of a fitted row, whole cache lines."""
    if kind in ("f32", "bf16"):
        return padded * (4 if kind == "f32" else 2)
    return (padded + padded // GROUP[kind] * 8 + 63) // 64 * 64


@njit(**FLAGS)
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


@njit(**FLAGS)
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
    while True:
        start = fetch_add(counter, _PIECE)
        if start >= panels:
            return
        for p in range(start, min(start + _PIECE, panels)):
            w, at = weights + p * panel, 4 * PANEL * p
            s, b, row = scale + at, bias + at, 0
            while row + 8 <= rows:
                y = out + at + 4 * row * width
                _tile8(like, x + row * stride, stride, w, padded, s, b, y, width)
                row += 8
            if row + 4 <= rows:
                y = out + at + 4 * row * width
                _tile4(like, x + row * stride, stride, w, padded, s, b, y, width)
                row += 4
            if row + 2 <= rows:
                y = out + at + 4 * row * width
                _tile2(like, x + row * stride, stride, w, padded, s, b, y, width)
                row += 2
            if row < rows:
                y = out + at + 4 * row * width
                _tile1(like, x + row * stride, stride, w, padded, s, b, y, width)


class Format(NamedTuple):
    """Addresses of a format's two functions: other compiled code calls them without knowing which
    format it is, and need not be compiled again for each."""

    fit: int  # `_fit_row` without `like`
    multiply: int  # `_multiply` without `like`


_CACHED = {"cache": FLAGS["cache"], "error_model": "numpy"}


@functools.cache
def compile_format(kind: Weights) -> Format:
    """Compiles a format's functions, or fetches them from numba's cache."""
    like = LIKE[kind]

    @cfunc(types.void(*[types.int64] * 5), **_CACHED)
    def fit(x: Any, first: Any, end: Any, row: Any, padded: Any) -> None:
        _fit_row(like, x, first, end, row, padded)

    @cfunc(types.void(*[types.int64] * 12), **_CACHED)
    def multiply(
        x: Any, stride: Any, rows: Any, weights: Any, padded: Any, panel: Any, panels: Any,
        scale: Any, bias: Any, out: Any, width: Any, counter: Any,
    ) -> None:  # fmt: skip
        _multiply(
            like, x, stride, rows, weights, padded, panel, panels, scale, bias, out, width, counter
        )

    return Format(fit.address, multiply.address)


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


@njit(types.void(*[types.int64] * 18), **FLAGS)
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
