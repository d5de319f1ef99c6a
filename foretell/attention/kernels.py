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
from numba import float32, int32, int64, types, uint16, uint32

from foretell.attention.blocks import ask, copy_block, count_plain
from foretell.attention.jit import jit
from foretell.attention.micro import BLOCK, CHUNK, PAIRS, step
from foretell.attention.together import LINE, fetch_add, meet

TILE = 16
"""Rows that share a copied block. Changes no bits."""
PART = 256
"""Keys that one thread takes: with 3 heads and 2 threads, whole ones would leave a thread waiting.
Changing it changes the last bits of results beyond it."""


_step1, _step2, _step3, _step_most = (step(pairs) for pairs in (1, 2, 3, PAIRS))
_LOG2E = np.float32(1.4426950408889634)
_MAGIC = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)


@jit(fastmath={"contract"})
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


@jit()
def to_cache(x: Any, like: Any) -> Any:
    """The bits of float32 x in the cache's width; bfloat16 rounds to nearest, ties to even."""
    bits = np.float32(x).view(np.uint32)
    if like.itemsize == 4:
        return bits
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint32(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)


@jit()
def _steps(
    cache: Any, q: Any, kt: Any, v: Any, dim: Any, o: Any, state: Any, s: Any, pair: Any,
    end_pair: Any, first: Any, end: Any,
) -> None:  # fmt: skip
    """Takes keys first .. end - 1 of a block into pairs pair .. end_pair - 1."""
    while pair + PAIRS <= end_pair:
        _step_most(cache, q, kt, v, dim, o, state, s, pair, first, end)
        pair += PAIRS
    if pair + 3 == end_pair:
        _step3(cache, q, kt, v, dim, o, state, s, pair, first, end)
    elif pair + 2 == end_pair:
        _step2(cache, q, kt, v, dim, o, state, s, pair, first, end)
    elif pair + 1 == end_pair:
        _step1(cache, q, kt, v, dim, o, state, s, pair, first, end)


@jit(fastmath={"contract"})
def _sum_parts(parts: Any, num: Any, out: Any) -> None:
    """Sums of values, each with its maximum and sum of weights behind it [num, D + 2], as one."""
    dim = out.shape[0]
    top = np.float32(-np.inf)
    for part in range(num):
        top = max(top, parts[part, dim])
    total = np.float32(0.0)
    out[:] = np.float32(0.0)
    for part in range(num):
        high = parts[part, dim]
        by = np.float32(0.0) if high == np.float32(-np.inf) else exp(high - top)
        total += parts[part, dim + 1] * by
        for d in range(dim):
            out[d] += parts[part, d] * by
    inverse = np.float32(1.0) / total if total != 0 else np.float32(0.0)
    for d in range(dim):
        out[d] *= inverse


def _attend(
    q: Any,  # [R, H, D] float32
    out: Any,  # [R, H, D] float32
    k_cache: Any,  # [pages, Hkv, page_size * D] bits of float32 or bfloat16
    v_cache: Any,
    rows: Any,  # [R, 4] int32: prefix, base, count, position
    ancestors: Any,  # [R] uint64
    tiles: Any,  # [tiles, 3] int32: first row, end row, sequence
    pieces: Any,  # [pieces, 3] int32: tile, which part of its keys, how many parts
    table: Any,  # [B, P] int32
    size: int,
    window: int,
    scale: float,
    parts: Any,  # [R, H, most parts, D padded + 2] float32: scratch
    done: Any,  # [tiles, Hkv] int64: zeros
    counter: int,
) -> None:
    """Attention of the (piece, kv head) pairs that this thread gets, handed out by the int64 at
    address `counter`. Keys are taken in parts of `PART` from key 0, which several threads may work
    at; the last one to finish adds the parts up in order, so that nobody's share shows in a bit."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    padded = (dim + CHUNK - 1) // CHUNK * CHUNK
    scratch = np.empty(BLOCK * padded, k_cache.dtype)
    places = np.empty(2 * BLOCK, np.int64)
    v, own_v = np.empty(BLOCK * padded, np.float32), np.empty(BLOCK * padded, np.float32)
    kt, own_kt = np.empty(BLOCK * padded, np.float32), np.empty(BLOCK * padded, np.float32)
    # In the cache's own numbers: two bfloat16 are multiplied and added as one float32 is.
    qs = np.zeros(TILE * group * padded, k_cache.dtype)
    o = np.empty(TILE * group * padded, np.float32)
    state = np.empty(TILE * group * 2, np.float32)
    s = np.empty(PAIRS * BLOCK, np.float32)
    begins, ends = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    plain = np.empty(TILE, np.int64)
    items = pieces.shape[0] * kv_heads
    item = fetch_add(counter, 1)
    while item < items:
        following = fetch_add(counter, 1)
        piece, head = item // kv_heads, item % kv_heads
        tile, part, num_parts = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
        first_row, num = tiles[tile, 0], tiles[tile, 1] - tiles[tile, 0]
        pages = table[tiles[tile, 2]]
        first_key, end_key = np.int64(part) * PART, (np.int64(part) + 1) * PART
        for t in range(num):
            row = first_row + t
            begins[t] = max(first_key, np.int64(rows[row, 3]) + 1 - window)
            ends[t] = min(np.int64(rows[row, 2]), end_key)
            plain[t] = count_plain(rows[row], ancestors[row])
            for g in range(group):
                pair = t * group + g
                state[2 * pair] = -np.inf
                state[2 * pair + 1] = 0.0
                for d in range(dim):
                    qs[pair * padded + d] = to_cache(q[row, head * group + g, d] * scale, k_cache)
        o[: num * group * padded] = 0.0
        first_block = begins[:num].min() // BLOCK
        end_block = (ends[:num].max() + BLOCK - 1) // BLOCK
        for block in range(first_block, end_block):
            start = block * BLOCK
            shared = np.int64(0)
            for t in range(num):
                end = min(ends[t], start + BLOCK)
                if end <= plain[t]:
                    shared = max(shared, end)
            if shared > start:
                copy_block(
                    k_cache, v_cache, kt, v, scratch, places, pages, head, start, shared, shared,
                    rows[first_row], ancestors[first_row], dim, padded, size,
                )  # fmt: skip
            if block + 1 < end_block:
                ask(
                    k_cache, v_cache, pages, head, start + BLOCK,
                    min(start + 2 * BLOCK, plain[:num].max()), dim, size,
                )  # fmt: skip
            elif following < items:
                after = following // kv_heads
                key, other = np.int64(pieces[after, 1]) * PART, tiles[pieces[after, 0]]
                ask(
                    k_cache, v_cache, table[other[2]], following % kv_heads, key,
                    min(key + BLOCK, np.int64(rows[other[0], 0])), dim, size,
                )  # fmt: skip
            t = 0
            while t < num:
                end, begin = min(ends[t], start + BLOCK), max(start, begins[t])
                first, t = t, t + 1
                if begin >= end:
                    continue
                if end > plain[first]:
                    row = first_row + first
                    copy_block(
                        k_cache, v_cache, own_kt, own_v, scratch, places, pages, head, start, end,
                        plain[first], rows[row], ancestors[row], dim, padded, size,
                    )  # fmt: skip
                    _steps(
                        k_cache, qs, own_kt, own_v, padded, o, state, s, first * group, t * group,
                        begin - start, end - start,
                    )  # fmt: skip
                    continue
                while (
                    t < num
                    and min(ends[t], start + BLOCK) == end
                    and max(start, begins[t]) == begin
                    and end <= plain[t]
                ):
                    t += 1
                _steps(
                    k_cache, qs, kt, v, padded, o, state, s, first * group, t * group,
                    begin - start, end - start,
                )  # fmt: skip
        for t in range(num):
            for g in range(group):
                pair = t * group + g
                target = parts[first_row + t, head * group + g, part]
                target[dim] = state[2 * pair]
                target[dim + 1] = state[2 * pair + 1]
                for d in range(dim):
                    target[d] = o[pair * padded + d]
        place = done.ctypes.data + 8 * (np.int64(tile) * kv_heads + head)
        if fetch_add(place, 1) == num_parts - 1:
            for t in range(num):
                for h in range(head * group, (head + 1) * group):
                    _sum_parts(parts[first_row + t, h], num_parts, out[first_row + t, h])
        item = following


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


attend_any = jit()(_attend)
"""`attend` for other compiled code: it takes the types it is called with."""
SYNC = 3 * LINE


def _attend_alone(
    q: Any, out: Any, k_cache: Any, v_cache: Any, rows: Any, ancestors: Any, tiles: Any,
    pieces: Any, table: Any, size: Any, window: Any, scale: Any, parts: Any, done: Any, sync: Any,
    share: Any, shares: Any,
) -> None:  # fmt: skip
    attend_any(
        q, out, k_cache, v_cache, rows, ancestors, tiles, pieces, table, size, window, scale,
        parts, done, sync + 2 * LINE,
    )  # fmt: skip
    meet(sync, shares)


_BITS = {2: uint16[:, :, ::1], 4: uint32[:, :, ::1]}


@functools.cache
def attend(itemsize: int) -> Callable[..., None]:
    """The compiled kernel for a cache of 2 (bfloat16) or 4 (float32) bytes a number; its last
    arguments are the address of `SYNC` bytes of zeros, share and shares."""
    cache = _BITS[itemsize]
    signature = types.void(
        strided(float32, 3), float32[:, :, ::1], cache, cache, int32[:, ::1], numba.uint64[::1],
        int32[:, ::1], int32[:, ::1], int32[:, ::1], int64, int64, float32,
        float32[:, :, :, ::1], int64[:, ::1], int64, int64, int64,
    )  # fmt: skip
    return jit(signature)(_attend_alone)


@functools.cache
def write(itemsize: int) -> Callable[..., None]:
    """The compiled writer for a cache of 2 or 4 bytes a number."""
    cache, rows = _BITS[itemsize], strided(float32, 3)
    return jit(types.void(rows, rows, cache, cache, int32[::1], int64))(_write)
