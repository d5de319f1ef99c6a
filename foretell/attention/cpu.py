"""Attention on the CPU: batch invariant by construction, one pass over each sequence's pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Layout
from foretell.attention.pool import num_threads, together
from foretell.attention.rows import cache_bits

_WORTH_A_THREAD = 10_000_000
"""Multiply-adds from which a second thread pays for waking it (about 0.2 ms of work)."""
NO_WINDOW = 1 << 40
"""The window of a layer that has none."""


class CpuAttention:
    """Paged attention over float32 or bfloat16 caches, compiled by numba.

    A row's bits depend on its q and its keys in text order alone, so they are the same for a row
    of a prompt chunk, a decode row and a tree node, for any page order and number of threads.

    Args:
        threads: most threads of one call; `num_threads` if not given.
    """

    def __init__(self, threads: int | None = None) -> None:
        from foretell.attention import kernels, tiling

        self._kernels, self._tiling = kernels, tiling
        self._threads = threads

    def plan(self, layout: Layout) -> None:
        """Cuts the rows into tiles: neighbours of one sequence, which share copied keys."""
        self._size = layout.page_size
        self._cells = layout.cells.numpy()
        self._row_seq = layout.row_seq.numpy()
        table = np.ascontiguousarray(layout.page_table.numpy())
        ancestors = np.ascontiguousarray(layout.ancestors.numpy()).view(np.uint64)
        rows, self._keys = self._tiling.places(
            layout.prefix.numpy(), layout.base.numpy(), ancestors, layout.positions.numpy()
        )
        *cut, self.num_parts = self._tiling.cut(rows, self._row_seq)
        self.planned = (rows, ancestors, *cut, table)
        """What the kernel reads of the layout."""

    def plan_of(self, picked: np.ndarray) -> tuple[np.ndarray, ...]:
        """The first four of `planned` for some of its rows [O], in ascending order."""
        rows, ancestors = self.planned[0][picked], self.planned[1][picked]
        return rows, ancestors, *self._tiling.cut(rows, self._row_seq[picked])[:2]

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
        keys, queries = cache_bits(k_cache), (q.detach() if q.requires_grad else q).numpy()
        rows, heads, dim = queries.shape
        out = torch.empty(rows, heads, dim)
        parts = np.empty((rows, heads, self.num_parts, dim + 2), np.float32)
        done = np.zeros((len(self.planned[2]), keys.shape[1]), np.int64)
        sync = np.zeros(self._kernels.SYNC, np.uint8)
        arguments = (
            queries, out.numpy(), keys, cache_bits(v_cache), *self.planned, self._size,
            window or NO_WINDOW, scale, parts, done, sync.ctypes.data,
        )  # fmt: skip
        worth = 2 * self._keys * heads * dim > _WORTH_A_THREAD
        shares = (self._threads or num_threads()) if worth else 1
        together(self._kernels.attend(keys.itemsize), arguments, shares, sync)
        return out
