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

from foretell.attention.compiling import watch
from foretell.attention.fetch import fetch
from foretell.attention.micro import BLOCK, CHUNK, PAIRS, SLACK, step, transpose, widen

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


watch()
FLAGS = {"nogil": True, "error_model": "numpy", "cache": _can_cache()}
_step1, _step2, _step3, _step4 = (step(pairs) for pairs in (1, 2, 3, PAIRS))
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


@njit(**FLAGS)
def _find(
    places: Any, table: Any, heads: Any, head: Any, first: Any, num: Any, at: Any, dim: Any,
    size: Any,
) -> None:  # fmt: skip
    """Places in the cache of logical cells first .. first + num - 1, for key `at` onwards."""
    while num > 0:
        page, offset = np.int64(table[first // size]), first % size
        run = min(num, size - offset)
        start = ((page * heads + head) * size + offset) * dim
        for x in range(run):
            places[at + x] = start + x * dim
        first += run
        at += run
        num -= run


@njit(**FLAGS)
def _copy_block(
    k_cache: Any, v_cache: Any, kt: Any, v: Any, scratch: Any, places: Any, table: Any,
    head: Any, start: Any, end: Any, plain: Any, row: Any, ancestors: Any, dim: Any, size: Any,
) -> None:  # fmt: skip
    """Keys start .. end - 1 of a row: the first `plain` of its text are cells, then ancestors."""
    heads = k_cache.shape[1]
    num = max(0, min(end, plain) - start)
    _find(places, table, heads, head, start, num, 0, dim, size)
    if end > plain:
        index, base = np.int64(row[0]), np.int64(row[1])
        for j in range(1, 64):
            if (ancestors >> np.uint64(j)) & np.uint64(1):
                if max(start, plain) <= index < end:
                    _find(places, table, heads, head, base + j, 1, index - start, dim, size)
                index += 1
    for j in range(end - start, BLOCK):
        places[j] = places[0]
    if dim % CHUNK == 0:
        transpose(k_cache, places, dim, kt)
        widen(v_cache, places, dim, v)
    else:  # the vectors' last items could lie past the cache's end
        _copy(k_cache, places, dim, scratch)
        transpose(scratch, places[BLOCK:], dim, kt)
        _copy(v_cache, places, dim, scratch)
        widen(scratch, places[BLOCK:], dim, v)


@njit(**FLAGS)
def _ask(
    k_cache: Any, v_cache: Any, table: Any, head: Any, first: Any, end: Any, dim: Any, size: Any
) -> None:
    """Has cells first .. end - 1 of a head fetched, to be copied soon."""
    while first < end:
        page, offset = np.int64(table[first // size]), first % size
        run = min(end - first, size - offset)
        start = ((page * k_cache.shape[1] + head) * size + offset) * dim
        fetch(k_cache, start, run * dim)
        fetch(v_cache, start, run * dim)
        first += run


@njit(**FLAGS)
def _copy(cache: Any, places: Any, dim: Any, scratch: Any) -> None:
    """A block's keys or values to scratch [BLOCK * D]; the new places follow the old."""
    flat = cache.reshape(-1)
    for j in range(BLOCK):
        places[BLOCK + j] = j * dim
        for d in range(dim):
            scratch[j * dim + d] = flat[places[j] + d]


@njit(**FLAGS)
def _plain(row: Any, ancestors: Any) -> Any:
    """How many of a row's first keys lie in cells 0, 1, 2, ...: its prefix, and the ancestors that
    follow it without a gap, so that a chain of drafts is like a prompt."""
    num = np.int64(row[0])
    if row[1] + 1 == num:
        j = np.uint64(1)
        while j < np.uint64(64) and (ancestors >> j) & np.uint64(1):
            num += 1
            j += np.uint64(1)
    return num


@njit(**FLAGS)
def _steps(
    q: Any, kt: Any, v: Any, dim: Any, padded: Any, o: Any, state: Any, s: Any, pair: Any,
    end_pair: Any, first: Any, end: Any,
) -> None:  # fmt: skip
    """Takes keys first .. end - 1 of a block into pairs pair .. end_pair - 1."""
    while pair + 4 <= end_pair:
        _step4(q, kt, v, dim, padded, o, state, s, pair, first, end)
        pair += 4
    if pair + 3 == end_pair:
        _step3(q, kt, v, dim, padded, o, state, s, pair, first, end)
    elif pair + 2 == end_pair:
        _step2(q, kt, v, dim, padded, o, state, s, pair, first, end)
    elif pair + 1 == end_pair:
        _step1(q, kt, v, dim, padded, o, state, s, pair, first, end)


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
    padded = (dim + CHUNK - 1) // CHUNK * CHUNK
    scratch = np.empty(BLOCK * dim + SLACK, k_cache.dtype)
    places = np.empty(2 * BLOCK, np.int64)
    v, own_v = np.empty(scratch.size, np.float32), np.empty(scratch.size, np.float32)
    kt = np.empty(BLOCK * padded + SLACK, np.float32)
    own_kt = np.empty(kt.size, np.float32)
    qs = np.empty(TILE * group * dim, np.float32)
    o = np.empty(TILE * group * padded, np.float32)
    state = np.empty(TILE * group * 2, np.float32)
    s = np.empty(PAIRS * BLOCK, np.float32)
    begins, ends = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    plain = np.empty(TILE, np.int64)
    for item in range(share, tiles.shape[0] * kv_heads, shares):
        tile, head = item // kv_heads, item % kv_heads
        first_row, num = tiles[tile, 0], tiles[tile, 1] - tiles[tile, 0]
        pages = table[tiles[tile, 2]]
        for t in range(num):
            row = first_row + t
            begins[t] = max(np.int64(0), np.int64(rows[row, 3]) + 1 - window)
            ends[t] = rows[row, 2]
            plain[t] = _plain(rows[row], ancestors[row])
            for g in range(group):
                pair = t * group + g
                state[2 * pair] = -np.inf
                state[2 * pair + 1] = 0.0
                for d in range(dim):
                    qs[pair * dim + d] = q[row, head * group + g, d] * scale
        o[: num * group * padded] = 0.0
        first_block = begins[:num].min() // BLOCK
        end_block = (ends[:num].max() + BLOCK - 1) // BLOCK
        cells = plain[:num].max()
        for block in range(first_block, end_block):
            start = block * BLOCK
            shared = np.int64(0)
            for t in range(num):
                end = min(ends[t], start + BLOCK)
                if end <= plain[t]:
                    shared = max(shared, end)
            if shared > start:
                _copy_block(
                    k_cache, v_cache, kt, v, scratch, places, pages, head, start, shared, shared,
                    rows[first_row], ancestors[first_row], dim, size,
                )  # fmt: skip
            if block + 1 < end_block:
                asked, ask = head, start + BLOCK
            else:
                asked, ask = head + shares, first_block * BLOCK
            if asked < kv_heads:
                _ask(k_cache, v_cache, pages, asked, ask, min(ask + BLOCK, cells), dim, size)
            t = 0
            while t < num:
                end, begin = min(ends[t], start + BLOCK), max(start, begins[t])
                first, t = t, t + 1
                if begin >= end:
                    continue
                if end > plain[first]:
                    row = first_row + first
                    _copy_block(
                        k_cache, v_cache, own_kt, own_v, scratch, places, pages, head, start, end,
                        plain[first], rows[row], ancestors[row], dim, size,
                    )  # fmt: skip
                    _steps(
                        qs, own_kt, own_v, dim, padded, o, state, s, first * group, t * group,
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
                    qs, kt, v, dim, padded, o, state, s, first * group, t * group,
                    begin - start, end - start,
                )  # fmt: skip
        for t in range(num):
            for g in range(group):
                pair = t * group + g
                total = state[2 * pair + 1]
                inverse = np.float32(1.0) / total if total != 0 else np.float32(0.0)
                for d in range(dim):
                    out[first_row + t, head * group + g, d] = o[pair * padded + d] * inverse


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


attend_any = njit(**FLAGS)(_attend)
"""`attend` for other compiled code: it takes the types it is called with."""
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
