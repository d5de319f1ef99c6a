"""Blocks of a sequence's keys and values, copied out of the pages they lie in."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.attention.fetch import fetch
from foretell.attention.jit import jit
from foretell.attention.micro import BLOCK, gather, transpose


@jit()
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


@jit()
def copy_block(
    k_cache: Any, v_cache: Any, kt: Any, v: Any, scratch: Any, places: Any, table: Any,
    head: Any, start: Any, end: Any, plain: Any, row: Any, ancestors: Any, dim: Any, padded: Any,
    size: Any,
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
    if dim == padded:
        transpose(k_cache, places, dim, kt)
        gather(v_cache, places, dim, v)
    else:
        _copy(k_cache, places, dim, padded, scratch)
        transpose(scratch, places[BLOCK:], padded, kt)
        _copy(v_cache, places, dim, padded, scratch)
        gather(scratch, places[BLOCK:], padded, v)


@jit()
def ask(
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


@jit()
def _copy(cache: Any, places: Any, dim: Any, padded: Any, scratch: Any) -> None:
    """A block's keys or values to scratch [BLOCK * padded], with zeros behind each; the new places
    follow the old."""
    flat = cache.reshape(-1)
    for j in range(BLOCK):
        places[BLOCK + j] = j * padded
        for d in range(dim):
            scratch[j * padded + d] = flat[places[j] + d]
        for d in range(dim, padded):
            scratch[j * padded + d] = 0


@jit()
def count_plain(row: Any, ancestors: Any) -> Any:
    """How many of a row's first keys lie in cells 0, 1, 2, ...: its prefix, and the ancestors that
    follow it without a gap, so that a chain of drafts is like a prompt."""
    num = np.int64(row[0])
    if row[1] + 1 == num:
        j = np.uint64(1)
        while j < np.uint64(64) and (ancestors >> j) & np.uint64(1):
            num += 1
            j += np.uint64(1)
    return num
