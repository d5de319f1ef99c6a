"""The CPU's attention kernel: one compiled function for a prompt row, a decode row, a tree node.

Flash attention's online softmax (Dao et al. 2022; Milakov and Gimelshein 2018) over blocks of
`BLOCK` keys counted from key 0 of the text. A row's arithmetic is a function of its q, its keys in
text order and nothing else: pages only say where to copy from, and tiles of rows only say how
often a copied block is used. Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import float32, int32, int64, njit, types, uint16, uint32

BLOCK = 32
"""Keys reduced together. Changing it changes the last bits of every result."""
TILE = 16
"""Rows that share a copied block. Changes no bits."""


def _can_cache() -> bool:
    """Numba keeps compiled code beside this file or in the user's cache directory, and refuses to
    go on where it may write to neither; then each process compiles for itself."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


FLAGS = {"nogil": True, "error_model": "numpy", "cache": _can_cache()}
_LOG2E = np.float32(1.4426950408889634)
_MAGIC = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)


@njit(fastmath={"contract"}, **FLAGS)
def exp(x: Any) -> Any:
    """e**x for float32 x up to 88, to 1.5 ulp (Cephes' polynomial); 0 below -87, NaN stays NaN.

    Written out because it vectorises, where a call to libm does not.
    """
    y = np.float32(-87.0) if x < np.float32(-87.0) else x
    z = y * _LOG2E + _MAGIC
    n = z - _MAGIC
    r = y - n * _LN2_HI - n * _LN2_LO
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    scale = np.int32((np.float32(z).view(np.int32) << np.int32(23)) + np.int32(127 << 23))
    p = p * scale.view(np.float32)
    return np.float32(0.0) if x < np.float32(-87.0) else p


@njit(fastmath={"reassoc", "contract", "nsz"}, **FLAGS)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0.0)
    for d in range(a.shape[0]):
        total += a[d] * b[d]
    return total


@njit(fastmath={"contract"}, **FLAGS)
def _add_values(o: Any, v: Any, p: Any, first: Any, end: Any) -> None:
    """o [D] += p[first:end] @ v [BLOCK * D], keys in order."""
    dim = o.shape[0]
    j = first
    while j + 4 <= end:
        p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
        v0, v1 = v[j * dim : (j + 1) * dim], v[(j + 1) * dim : (j + 2) * dim]
        v2, v3 = v[(j + 2) * dim : (j + 3) * dim], v[(j + 3) * dim : (j + 4) * dim]
        for d in range(dim):
            o[d] = (((o[d] + p0 * v0[d]) + p1 * v1[d]) + p2 * v2[d]) + p3 * v3[d]
        j += 4
    while j < end:
        p0, v0 = p[j], v[j * dim : (j + 1) * dim]
        for d in range(dim):
            o[d] += p0 * v0[d]
        j += 1


@njit(fastmath={"contract"}, **FLAGS)
def _softmax_step(q: Any, k: Any, v: Any, o: Any, state: Any, s: Any, first: Any, end: Any) -> None:
    """Takes keys first .. end - 1 of a block into one head's o [D] and (maximum, sum)."""
    dim = q.shape[0]
    for j in range(BLOCK):
        s[j] = -np.inf
    for j in range(first, end):
        s[j] = _dot(q, k[j * dim : (j + 1) * dim])
    top = s[BLOCK:]
    for j in range(8):
        a = max(s[j], s[j + 8])
        b = max(s[j + 16], s[j + 24])
        top[j] = max(a, b)
    high = max(
        max(max(top[0], top[1]), max(top[2], top[3])), max(max(top[4], top[5]), max(top[6], top[7]))
    )
    high = max(high, state[0])
    for j in range(BLOCK):
        s[j] = exp(s[j] - high)
    for j in range(8):
        top[j] = (s[j] + s[j + 8]) + (s[j + 16] + s[j + 24])
    total = ((top[0] + top[1]) + (top[2] + top[3])) + ((top[4] + top[5]) + (top[6] + top[7]))
    shrink = exp(state[0] - high)
    state[0] = high
    state[1] = state[1] * shrink + total
    for d in range(dim):
        o[d] *= shrink
    _add_values(o, v, s, first, end)


@njit(**FLAGS)
def _copy_run(
    cache: Any, bits: Any, table: Any, head: Any, first: Any, num: Any, at: Any, dim: Any, size: Any
) -> None:
    """Logical cells first .. first + num - 1 of a head to key `at` onwards of a block's bits."""
    shift = np.uint32(32 - 8 * cache.itemsize)  # bfloat16 is the upper half of a float32
    while num > 0:
        page, offset = table[first // size], first % size
        run = min(num, size - offset)
        source = cache[page, head, offset * dim : (offset + run) * dim]
        target = bits[at * dim : (at + run) * dim]
        for x in range(run * dim):
            target[x] = np.uint32(source[x]) << shift
        first += run
        at += run
        num -= run


@njit(**FLAGS)
def _copy_block(
    k_cache: Any,
    v_cache: Any,
    k_bits: Any,
    v_bits: Any,
    table: Any,
    head: Any,
    start: Any,
    end: Any,
    prefix: Any,
    base: Any,
    ancestors: Any,
    dim: Any,
    size: Any,
) -> None:
    """Keys start .. end - 1 of a row: of its prefix, then of its ancestors."""
    num = max(0, min(end, prefix) - start)
    if num > 0:
        _copy_run(k_cache, k_bits, table, head, start, num, 0, dim, size)
        _copy_run(v_cache, v_bits, table, head, start, num, 0, dim, size)
    if end > prefix:
        index = prefix
        for j in range(1, 64):
            if (ancestors >> np.uint64(j)) & np.uint64(1):
                if start <= index < end:
                    _copy_run(k_cache, k_bits, table, head, base + j, 1, index - start, dim, size)
                    _copy_run(v_cache, v_bits, table, head, base + j, 1, index - start, dim, size)
                index += 1


def _attend(
    q: Any,  # [R, H, D] float32
    out: Any,  # [R, H, D] float32
    k_cache: Any,  # [pages, Hkv, page_size * D] bits of float32 or bfloat16
    v_cache: Any,
    rows: Any,  # [R, 4] int32: prefix, base, count, position
    ancestors: Any,  # [R] uint64
    tiles: Any,  # [tiles, 3] int32: first row, end row, sequence
    table: Any,  # [B, P] int32
    size: int,
    window: int,
    scale: float,
    share: int,
    shares: int,
) -> None:
    """Attention of every `shares`-th (tile, kv head) from `share` on."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    k, v = np.empty(BLOCK * dim, np.float32), np.empty(BLOCK * dim, np.float32)
    own_k, own_v = np.empty(BLOCK * dim, np.float32), np.empty(BLOCK * dim, np.float32)
    qs = np.empty((TILE, group, dim), np.float32)
    o = np.empty((TILE, group, dim), np.float32)
    state = np.empty((TILE, group, 2), np.float32)
    s = np.empty(BLOCK + 8, np.float32)
    none = np.uint64(0)
    for item in range(share, tiles.shape[0] * kv_heads, shares):
        tile, head = item // kv_heads, item % kv_heads
        first_row, end_row = tiles[tile, 0], tiles[tile, 1]
        pages = table[tiles[tile, 2]]
        oldest, longest = np.int64(1 << 60), np.int64(0)
        for row in range(first_row, end_row):
            t = row - first_row
            longest = max(longest, np.int64(rows[row, 2]))
            oldest = min(oldest, max(np.int64(0), np.int64(rows[row, 3]) + 1 - window))
            for g in range(group):
                state[t, g, 0] = -np.inf
                state[t, g, 1] = 0.0
                for d in range(dim):
                    qs[t, g, d] = q[row, head * group + g, d] * scale
                    o[t, g, d] = 0.0
        for block in range(oldest // BLOCK, (longest + BLOCK - 1) // BLOCK):
            start = block * BLOCK
            shared = np.int64(0)
            for row in range(first_row, end_row):
                prefix = np.int64(rows[row, 0])
                if min(np.int64(rows[row, 2]), start + BLOCK) <= prefix:
                    shared = max(shared, min(np.int64(rows[row, 2]), start + BLOCK))
            if shared > start:
                _copy_block(
                    k_cache, v_cache, k.view(np.uint32), v.view(np.uint32), pages, head,
                    start, shared, shared, 0, none, dim, size,
                )  # fmt: skip
            for row in range(first_row, end_row):
                t = row - first_row
                end = min(np.int64(rows[row, 2]), start + BLOCK)
                begin = max(start, np.int64(rows[row, 3]) + 1 - window)
                if begin >= end:
                    continue
                block_k, block_v = k, v
                if end > rows[row, 0]:
                    block_k, block_v = own_k, own_v
                    _copy_block(
                        k_cache, v_cache, own_k.view(np.uint32), own_v.view(np.uint32), pages, head,
                        start, end, np.int64(rows[row, 0]), np.int64(rows[row, 1]), ancestors[row],
                        dim, size,
                    )  # fmt: skip
                for g in range(group):
                    _softmax_step(
                        qs[t, g], block_k, block_v, o[t, g], state[t, g], s,
                        begin - start, end - start,
                    )  # fmt: skip
        for row in range(first_row, end_row):
            t = row - first_row
            for g in range(group):
                total = state[t, g, 1]
                inverse = np.float32(1.0) / total if total != 0 else np.float32(0.0)
                for d in range(dim):
                    out[row, head * group + g, d] = o[t, g, d] * inverse


@njit(**FLAGS)
def to_cache(x: Any, like: Any) -> Any:
    """The bits of float32 x in the cache's width; bfloat16 rounds to nearest, ties to even."""
    bits = np.float32(x).view(np.uint32)
    if like.itemsize == 4:
        return bits
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint32(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)


def _write(k: Any, v: Any, k_cache: Any, v_cache: Any, cells: Any, size: Any) -> None:
    """k, v [R, Hkv, D] float32 to the rows' cells; a negative cell writes nothing."""
    dim = k.shape[2]
    for row in range(k.shape[0]):
        if cells[row] < 0:
            continue
        page, offset = cells[row] // size, (cells[row] % size) * dim
        for head in range(k.shape[1]):
            for d in range(dim):
                k_cache[page, head, offset + d] = to_cache(k[row, head, d], k_cache)
                v_cache[page, head, offset + d] = to_cache(v[row, head, d], v_cache)


def strided(dtype: Any, ndim: int) -> types.Array:
    """The type of an array of any strides: one compilation serves views and whole arrays."""
    return types.Array(dtype, ndim, "A")


_BITS = {2: uint16[:, :, ::1], 4: uint32[:, :, ::1]}


@functools.cache
def attend(itemsize: int) -> Callable[..., None]:
    """The compiled kernel for a cache of 2 (bfloat16) or 4 (float32) bytes a number."""
    cache = _BITS[itemsize]
    signature = types.void(
        strided(float32, 3), float32[:, :, ::1], cache, cache, int32[:, ::1], numba.uint64[::1],
        int32[:, ::1], int32[:, ::1], int64, int64, float32, int64, int64,
    )  # fmt: skip
    return njit(signature, **FLAGS)(_attend)


@functools.cache
def write(itemsize: int) -> Callable[..., None]:
    """The compiled writer for a cache of 2 or 4 bytes a number."""
    cache, rows = _BITS[itemsize], strided(float32, 3)
    return njit(types.void(rows, rows, cache, cache, int32[::1], int64), **FLAGS)(_write)
