"""Compiled matrix products: rows are fitted, then panels are handed out to threads.

Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, int64, njit, types
from numba.extending import intrinsic

from foretell.attention.kernels import FLAGS
from foretell.attention.together import LINE, fetch_add, meet
from foretell.config import Weights
from foretell.models.quant import GROUP, PANEL
from foretell.models.tiles import fit, tile

_PIECE = 4
"""Panels handed out at once."""
SYNC = 3 * LINE
"""int64 items that `product` needs to keep its threads together."""


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@njit(**FLAGS)
def floats(address: Any, count: Any) -> Any:
    """`count` float32 at an address, as an array."""
    return carray(_pointer(address), (count,))


def row_bytes(kind: Weights, padded: int) -> int:
    """Bytes of a fitted row, whole cache lines."""
    if kind in ("f32", "bf16"):
        return padded * (4 if kind == "f32" else 2)
    return (padded + padded // GROUP[kind] * 8 + 63) // 64 * 64


@functools.cache
def fit_row(kind: Weights) -> Callable[..., None]:
    """``fit_row(x, first, end, row, padded)``: fits inputs first .. end - 1 of a row at address x
    into the fitted row at address `row`; `first` starts a group, `end` ends one or the row."""
    group, groups = GROUP[kind], fit(kind)

    @njit(**FLAGS)
    def function(x: Any, first: Any, end: Any, row: Any, padded: Any) -> None:
        whole = first + (end - first) // group * group
        if whole > first:
            groups(x, row, first, whole, padded)
        if whole < end:
            rest = np.zeros(group, np.float32)
            rest[: end - whole] = floats(x + 4 * whole, end - whole)
            groups(rest.ctypes.data - 4 * whole, row, whole, whole + group, padded)

    return function


@functools.cache
def multiply(kind: Weights) -> Callable[..., None]:
    """The product of fitted rows with a matrix, as much of it as this thread gets.

    Its arguments: address of the rows, bytes between them and their number; address of the
    weights, K padded, bytes of a panel, panels; addresses of scales and biases; address of the
    outputs and items between their rows; `sync` and its item that counts what was handed out.
    """
    one, two, four, eight = (tile(kind, rows) for rows in (1, 2, 4, 8))

    @njit(**FLAGS)
    def function(
        x: Any, stride: Any, rows: Any, weights: Any, padded: Any, panel: Any, panels: Any,
        scale: Any, bias: Any, out: Any, width: Any, sync: Any, counter: Any,
    ) -> None:  # fmt: skip
        while True:
            start = fetch_add(sync, counter, _PIECE)
            if start >= panels:
                return
            for p in range(start, min(start + _PIECE, panels)):
                w, at = weights + p * panel, 4 * PANEL * p
                s, b, row = scale + at, bias + at, 0
                while row + 8 <= rows:
                    y = out + at + 4 * row * width
                    eight(x + row * stride, stride, w, padded, s, b, y, width)
                    row += 8
                if row + 4 <= rows:
                    y = out + at + 4 * row * width
                    four(x + row * stride, stride, w, padded, s, b, y, width)
                    row += 4
                if row + 2 <= rows:
                    y = out + at + 4 * row * width
                    two(x + row * stride, stride, w, padded, s, b, y, width)
                    row += 2
                if row < rows:
                    y = out + at + 4 * row * width
                    one(x + row * stride, stride, w, padded, s, b, y, width)

    return function


@functools.cache
def product(kind: Weights) -> Callable[..., None]:
    """One product on its own; see `PackedLinear` for its arguments."""
    fit, run = fit_row(kind), multiply(kind)

    @njit(types.void(*[int64] * 13, int64[::1], int64, int64), **FLAGS)
    def function(
        x: Any, inputs: Any, rows: Any, fitted: Any, stride: Any, weights: Any, padded: Any,
        panel: Any, panels: Any, scale: Any, bias: Any, out: Any, width: Any, sync: Any,
        share: Any, shares: Any,
    ) -> None:  # fmt: skip
        for row in range(share, rows, shares):
            fit(x + 4 * row * inputs, 0, inputs, fitted + row * stride, padded)
        meet(sync, shares)
        run(
            fitted, stride, rows, weights, padded, panel, panels, scale, bias, out, width, sync,
            2 * LINE,
        )  # fmt: skip

    return function
