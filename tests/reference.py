"""Attention in plain torch, on any device: the specification that the fast backends are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.attention.base import Layout
from foretell.attention.rows import store


class ReferenceAttention:
    """Gathers each row's own keys in text order, then softmax. Slow, and obviously right.

    Computes in the dtype of q (float32 or float64), row by row, so that a row's bits depend on its
    own keys alone. A row without keys (padding) gives zeros. Keys that a row does not see cannot
    touch it, not even as NaN.
    """

    def plan(self, layout: Layout) -> None:
        """Lists each row's keys as physical cells, in the order of their place in the text."""
        size = layout.page_size
        logical = torch.arange(layout.page_table.shape[1] * size, device=layout.base.device)  # [L]
        node = logical - layout.base[:, None]  # [R, L] which tree node a logical cell belongs to
        is_node = (node >= 1) & (node < 64)
        bit = (layout.ancestors[:, None] >> node.clamp(0, 63)) & 1  # right of bit 63 too: & 1
        seen = (logical < layout.prefix[:, None]) | (is_node & (bit == 1))  # [R, L]
        pages = layout.page_table[layout.row_seq.long()][:, logical // size]  # [R, L]
        physical = (pages * size + logical % size).clamp(min=0)
        assert not (seen & (pages < 0)).any(), "a row sees a cell that has no page"
        self.count = seen.sum(1)  # [R]
        order = (~seen).to(torch.uint8).argsort(dim=1, stable=True)  # seen cells first, ascending
        width = max(1, int(self.count.max())) if len(seen) else 1
        self.keys = physical.gather(1, order)[:, :width].long()  # [R, K]
        # A place past a row's last key repeats its first: masked, but safe to multiply by zero.
        index = torch.arange(self.keys.shape[1], device=self.keys.device)
        self.keys = torch.where(index < self.count[:, None], self.keys, self.keys[:, :1])
        self.layout = layout

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Stores k, v [R, Hkv, D] in the rows' cells; a row whose cell is negative stores none."""
        store(k, v, k_cache, v_cache, self.layout.cells)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See `Attention.run`; the result has q's dtype."""
        out = torch.zeros_like(q)
        groups, size = q.shape[1] // k_cache.shape[1], self.layout.page_size
        for row, count in enumerate(self.count.tolist()):
            first = 0
            if window is not None:
                first = max(0, int(self.layout.positions[row]) + 1 - window)
            if first >= count:
                continue
            cells = self.keys[row, first:count]  # [K]
            k = k_cache[cells // size, :, cells % size].to(q.dtype)  # [K, Hkv, D]
            v = v_cache[cells // size, :, cells % size].to(q.dtype)
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            scores = torch.einsum("hd,khd->hk", q[row], k) * scale
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(dim=1), v)
        return out
