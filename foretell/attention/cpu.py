"""Attention on the CPU: batch invariant by construction, one pass over each sequence's pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Layout
from foretell.attention.pool import in_shares
from foretell.attention.rows import cache_bits

_WORTH_A_THREAD = 10_000_000
"""Multiply-adds from which a second thread pays for waking it (about 0.2 ms of work)."""
_NO_WINDOW = 1 << 40


class CpuAttention:
    """Paged attention over float32 or bfloat16 caches, compiled by numba.

    A row's bits depend on its q and its keys in text order alone, so they are the same for a row
    of a prompt chunk, a decode row and a tree node, for any page order and number of threads.

    Args:
        threads: most threads of one call; as many as torch uses if not given.
    """

    def __init__(self, threads: int | None = None) -> None:
        from foretell.attention import kernels

        self._kernels = kernels
        self._threads = threads

    def plan(self, layout: Layout) -> None:
        """Cuts the rows into tiles: neighbours of one sequence, which share copied keys."""
        self._size = layout.page_size
        self._cells = layout.cells.numpy()
        self._table = np.ascontiguousarray(layout.page_table.numpy())
        self._ancestors = np.ascontiguousarray(layout.ancestors.numpy()).view(np.uint64)
        rows = np.empty((layout.num_rows, 4), np.int32)
        rows[:, 0] = layout.prefix.numpy()
        rows[:, 1] = layout.base.numpy()
        rows[:, 2] = rows[:, 0] + np.bitwise_count(self._ancestors & np.uint64(2**64 - 2))
        rows[:, 3] = layout.positions.numpy()
        self._rows = rows
        self._tiles = _tiles(layout.row_seq.numpy(), self._kernels.TILE)
        self._keys = int(rows[:, 2].sum())

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Stores k, v [R, Hkv, D] in the rows' cells; a row whose cell is negative stores none."""
        keys, values = cache_bits(k_cache), cache_bits(v_cache)
        write = self._kernels.write(keys.itemsize)
        write(k.detach().numpy(), v.detach().numpy(), keys, values, self._cells, self._size)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See `Attention.run`. q [R, H, D] float32 may be a view of any strides."""
        keys = cache_bits(k_cache)
        kernel = self._kernels.attend(keys.itemsize)
        out = torch.empty(q.shape)
        arguments = (
            q.detach().numpy(), out.numpy(), keys, cache_bits(v_cache), self._rows,
            self._ancestors, self._tiles, self._table, self._size, window or _NO_WINDOW, scale,
        )  # fmt: skip
        shares = 1
        if 2 * self._keys * q.shape[1] * q.shape[2] > _WORTH_A_THREAD:
            threads = self._threads or torch.get_num_threads()
            shares = min(threads, len(self._tiles) * keys.shape[1])
        in_shares(kernel, arguments, shares)
        return out


def _tiles(row_seq: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """[tiles, 3] int32 first row, end row, sequence: runs of one sequence, at most `most` rows."""
    ends = [*(np.flatnonzero(np.diff(row_seq)) + 1).tolist(), len(row_seq)]
    tiles: list[tuple[int, int, int]] = []
    start = 0
    for end in ends:
        while start < end:
            stop = min(end, start + most)
            tiles.append((start, stop, int(row_seq[start])))
            start = stop
    return np.array(tiles, np.int32).reshape(-1, 3)
