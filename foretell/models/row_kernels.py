"""Compiled loops of `rows`. Imported on first use, as numba is slow to import."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, njit, types

# No fast-math: results must equal torch's, bit for bit.
_FLAGS = {"nogil": True, "error_model": "numpy", "cache": True}
_ROWS = float32[:, ::1]


@njit(types.void(float32[::1], float32[::1], int64), **_FLAGS)
def butterfly(source: Any, out: Any, half: Any) -> None:
    """Pairs (i, i + half) to their sum and difference."""
    for start in range(0, source.shape[0], 2 * half):
        low, high = source[start : start + half], source[start + half : start + 2 * half]
        sums, differences = out[start : start + half], out[start + half : start + 2 * half]
        for d in range(half):
            sums[d] = low[d] + high[d]
            differences[d] = low[d] - high[d]


@njit(types.void(float32[::1], float32[::1], float32), **_FLAGS)
def split(coarse: Any, fine: Any, step: Any) -> None:
    """A row within -1 .. 1 to whole multiples of `step`, in place, and the rest * 2 / step."""
    per_step, finer = np.float32(1.0) / step, np.float32(2.0) / step
    for d in range(coarse.shape[0]):
        value = coarse[d]
        level = min(max(np.rint(value * per_step), np.float32(-127.0)), np.float32(127.0))
        coarse[d] = level * step
        rest = (value - coarse[d]) * finer
        fine[d] = min(max(rest, np.float32(-1.0)), np.float32(1.0))


@njit(types.void(_ROWS, _ROWS, float32[::1], int64, float32), **_FLAGS)
def fit(x: Any, out: Any, scale: Any, stages: Any, step: Any) -> None:
    """See `rows.fit_rows`; twice as many rows in `out` as in `x` ask for fine ones."""
    rows, width = x.shape
    one, other = np.empty(width, np.float32), np.empty(width, np.float32)
    for row in range(rows):
        one[:] = x[row]
        half = width
        for _ in range(stages):
            half //= 2
            butterfly(one, other, half)
            one, other = other, one
        bits = one.view(np.int32)
        # Magnitudes of floats are ordered as their bits are, and integer maxima vectorise.
        top = np.int32(0)
        for d in range(width):
            top = max(top, bits[d] & np.int32(0x7FFFFFFF))
        high = np.int32(top).view(np.float32)
        target = out[row]
        if top >= np.int32(0x7F800000) or high < np.float32(1e-30):
            scale[row] = np.float32(np.nan) if top >= np.int32(0x7F800000) else np.float32(0.0)
            target[:width] = np.float32(0.0)
        else:
            scale[row] = high
            inverse = np.float32(1.0) / high
            for d in range(width):
                value = one[d] * inverse
                target[d] = min(max(value, np.float32(-1.0)), np.float32(1.0))
        if out.shape[0] > rows:
            split(target[:width], out[rows + row], step)
    for row in range(out.shape[0]):
        out[row, width] = np.float32(-1.0)
        out[row, width + 1] = np.float32(1.0)


@njit(types.void(_ROWS, float32[::1], float32[::1], float32), **_FLAGS)
def unfit(y: Any, scale: Any, bias: Any, step: Any) -> None:
    """See `rows.unfit_rows`; an empty `bias` is none."""
    rows, half = scale.shape[0], step * np.float32(0.5)
    for row in range(rows):
        target, by = y[row], scale[row]
        if y.shape[0] > rows:
            fine = y[rows + row]
            for d in range(target.shape[0]):
                target[d] += fine[d] * half
        if bias.shape[0]:
            for d in range(target.shape[0]):
                target[d] = target[d] * by + bias[d]
        else:
            for d in range(target.shape[0]):
                target[d] *= by
