"""Compiled kernels for the small steps between matrix products. Each row on its own, float32.

Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32, int64, types, uint16, uint32

from foretell.attention.jit import jit
from foretell.attention.kernels import exp, to_cache

_ROWS = float32[:, ::1]


@jit(fastmath={"reassoc", "contract", "nsz"})
def inverse_rms(x: Any, eps: Any) -> Any:
    total = np.float32(0.0)
    for d in range(x.shape[0]):
        total += x[d] * x[d]
    return np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)


@jit()
def norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    scale = inverse_rms(x, eps)
    for d in range(x.shape[0]):
        out[d] = weight[d] * (x[d] * scale)


@jit()
def add_row(x: Any, total: Any) -> None:
    for d in range(x.shape[0]):
        total[d] += x[d]


@jit(fastmath={"contract"})
def silu_row(gate: Any, up: Any, out: Any) -> None:
    for d in range(gate.shape[0]):
        x = gate[d]
        power = np.float32(88.0) if -x > np.float32(88.0) else -x
        out[d] = x / (np.float32(1.0) + exp(power)) * up[d]


@jit(types.void(_ROWS, float32[::1], float32, _ROWS))
def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in range(x.shape[0]):
        norm_row(x[row], weight, eps, out[row])


@jit(types.void(_ROWS, _ROWS, float32[::1], float32, _ROWS))
def add_rms_norm(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in range(x.shape[0]):
        add_row(x[row], residual[row])
        norm_row(residual[row], weight, eps, out[row])


@jit(types.void(_ROWS, _ROWS))
def silu_mul(gate_up: Any, out: Any) -> None:
    width = out.shape[1]
    for row in range(gate_up.shape[0]):
        silu_row(gate_up[row, :width], gate_up[row, width:], out[row])


@jit(fastmath={"contract"})
def _head(x: Any, cos: Any, sin: Any, weight: Any, eps: Any, low: Any, high: Any) -> None:
    """RMSNorm where weight is not empty, then the rotation of (d, d + half) pairs, in place."""
    if weight.shape[0] > 0:
        scale = inverse_rms(x, eps)
        for d in range(x.shape[0]):
            x[d] = weight[d] * (x[d] * scale)
    half = cos.shape[0]
    for d in range(half):  # copied out first: two halves that may overlap do not vectorise
        low[d] = x[d]
        high[d] = x[half + d]
    for d in range(half):
        x[d] = low[d] * cos[d] - high[d] * sin[d]
    target = x[half : 2 * half]
    for d in range(half):
        target[d] = high[d] * cos[d] + low[d] * sin[d]


def _rope_and_write(
    qkv: Any,  # [R, at least (H + 2 Hkv) * D]
    cos: Any,  # [P, rotated / 2]
    sin: Any,
    positions: Any,  # [R] int32
    q_norm: Any,  # [D], or [0] for none
    k_norm: Any,
    eps: Any,
    heads: int,
    kv_heads: int,
    k_cache: Any,  # [pages, Hkv, page_size * D] bits
    v_cache: Any,
    cells: Any,  # [R] int32
    size: int,
    dim: int,
) -> None:
    low, high = np.empty(cos.shape[1], np.float32), np.empty(cos.shape[1], np.float32)
    for row in range(qkv.shape[0]):
        c, s = cos[positions[row]], sin[positions[row]]
        for head in range(heads):
            _head(qkv[row, head * dim : (head + 1) * dim], c, s, q_norm, eps, low, high)
        for head in range(heads, heads + kv_heads):
            _head(qkv[row, head * dim : (head + 1) * dim], c, s, k_norm, eps, low, high)
        if size == 0 or cells[row] < 0:
            continue
        page, offset = cells[row] // size, (cells[row] % size) * dim
        for head in range(kv_heads):
            k = qkv[row, (heads + head) * dim : (heads + head + 1) * dim]
            first = (heads + kv_heads + head) * dim
            v = qkv[row, first : first + dim]
            keys, values = k_cache[page, head], v_cache[page, head]
            for d in range(dim):
                keys[offset + d] = to_cache(k[d], k_cache)
                values[offset + d] = to_cache(v[d], v_cache)


rope_and_write_any = jit(fastmath={"contract"})(_rope_and_write)
"""`rope_and_write` for other compiled code: it takes the types it is called with."""


@functools.cache
def rope_and_write(itemsize: int) -> Callable[..., None]:
    """The compiled kernel for a cache of 2 (bfloat16) or 4 (float32) bytes a number."""
    cache = uint16[:, :, ::1] if itemsize == 2 else uint32[:, :, ::1]
    signature = types.void(
        _ROWS, _ROWS, _ROWS, int32[::1], float32[::1], float32[::1], float32, int64, int64,
        cache, cache, int32[::1], int64, int64,
    )  # fmt: skip
    return jit(signature, fastmath={"contract"})(_rope_and_write)
