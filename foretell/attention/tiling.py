"""A pass's rows as the attention kernel takes them: in tiles, and these in pieces of work.

Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, types, uint64

from foretell.attention.jit import jit
from foretell.attention.kernels import PART, TILE

_WORDS = int32[:, ::1]


@jit(types.Tuple((_WORDS, int64))(int32[::1], int32[::1], uint64[::1], int32[::1]))
def places(prefix: Any, base: Any, ancestors: Any, positions: Any) -> Any:
    """[R, 4] int32: prefix, base, keys and position of each row; and how many keys in all."""
    rows, total = np.empty((prefix.shape[0], 4), np.int32), 0
    for row in range(prefix.shape[0]):
        keys, word = np.int64(prefix[row]), ancestors[row] >> np.uint64(1)  # it counts the root
        while word:
            word &= word - np.uint64(1)
            keys += 1
        rows[row, 0], rows[row, 1], rows[row, 2] = prefix[row], base[row], keys
        rows[row, 3] = positions[row]
        total += keys
    return rows, total


@jit(types.Tuple((_WORDS, _WORDS, int64))(_WORDS, int32[::1]))
def cut(rows: Any, row_seq: Any) -> Any:
    """Tiles [T, 3] int32: first row, end row, sequence, at most `TILE` rows of one sequence; pieces
    [P, 3] int32: tile, which part of its keys, how many parts; and the most parts of a tile."""
    tiles, parts = np.empty((rows.shape[0], 3), np.int32), np.empty(rows.shape[0], np.int64)
    num, start, keys = 0, 0, 0
    for row in range(rows.shape[0]):
        keys = max(keys, np.int64(rows[row, 2]))
        end = row + 1
        if end == rows.shape[0] or row_seq[end] != row_seq[start] or end - start == TILE:
            tiles[num, 0], tiles[num, 1], tiles[num, 2] = start, end, row_seq[start]
            parts[num] = max(1, (keys + PART - 1) // PART)
            num, start, keys = num + 1, end, 0
    pieces, piece, most = np.empty((parts[:num].sum(), 3), np.int32), 0, 1
    for tile in range(num):
        most = max(most, parts[tile])
        for part in range(parts[tile]):
            pieces[piece, 0], pieces[piece, 1], pieces[piece, 2] = tile, part, parts[tile]
            piece += 1
    return tiles[:num].copy(), pieces, most
