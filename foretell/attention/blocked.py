"""Attention in torch operations of fixed shapes: on a GPU, and wherever there is no compiler.

A library picks its way of summing by the shapes that it is given. Here these are always the same,
`_ROWS` rows and `_BLOCK` keys, whatever is in the batch: a row's bits depend on its own keys alone.
The host issues all of it without asking the device for anything.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.attention.base import Layout
from foretell.attention.rows import store

_ROWS = 16
_BLOCK = 128


class BlockedAttention:
    """Blocks of a row's keys, in the order of their place in the text, with a running softmax
    (Milakov and Gimelshein, 1805.02867). A row without keys gives zeros; keys that a row does not
    see cannot touch it, not even as NaN."""

    def plan(self, layout: Layout) -> None:
        """Lists each row's keys as physical cells, those that it sees first."""
        size, device = layout.page_size, layout.base.device
        width = layout.page_table.shape[1] * size
        logical = torch.arange(width, device=device)  # [L]
        node = logical - layout.base[:, None]  # [R, L] which tree node a logical cell belongs to
        bit = (layout.ancestors[:, None] >> node.clamp(0, 63)) & 1
        seen = (node >= 1) & (node < 64) & (bit == 1) | (logical < layout.prefix[:, None])
        pages = layout.page_table[layout.row_seq.long()][:, logical // size]  # [R, L]
        order = (~seen).to(torch.uint8).argsort(dim=1, stable=True)
        cells = (pages * size + logical % size).long().gather(1, order)
        more = (0, -width % _BLOCK, 0, -len(cells) % _ROWS)
        self.cells = F.pad(cells.clamp(min=0), more)  # [R', L'] whole chunks of whole blocks
        self.count = F.pad(seen.sum(1), more[2:])  # [R']
        self.position = F.pad(layout.positions, more[2:])  # [R']
        self.layout = layout

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """See `Attention.write`; a negative cell stores nothing that is read."""
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
        """See `Attention.run`."""
        rows, heads, dim = q.shape
        q = F.pad(q, (0, 0, 0, 0, 0, len(self.cells) - rows))
        q = q.view(-1, k_cache.shape[1], heads // k_cache.shape[1], dim)  # [R', Hkv, G, D]
        out = torch.empty_like(q)
        for start in range(0, len(q), _ROWS):
            chunk = slice(start, start + _ROWS)
            out[chunk] = self._chunk(q[chunk], chunk, k_cache, v_cache, scale, window)
        return out[:rows].view(rows, heads, dim)

    def _chunk(
        self,
        q: Tensor,  # [_ROWS, Hkv, G, D]
        chunk: slice,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        size, cells, count = self.layout.page_size, self.cells[chunk], self.count[chunk]
        top = q.new_full((*q.shape[:3], 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        first = (
            None if window is None else (self.position[chunk] + 1 - window)[:, None]
        )  # [_ROWS, 1]
        for start in range(0, cells.shape[1], _BLOCK):
            block = cells[:, start : start + _BLOCK]  # [_ROWS, _BLOCK]
            at = torch.arange(start, start + _BLOCK, device=q.device)
            hidden = at >= count[:, None]
            if first is not None:  # a key's place in the text is its place in the list
                hidden = hidden | (at < first)
            page, offset = block // size, block % size
            out_of_sight = hidden[:, :, None, None]
            k = k_cache[page, :, offset].to(q.dtype).masked_fill(out_of_sight, 0.0)
            v = v_cache[page, :, offset].to(q.dtype).masked_fill(out_of_sight, 0.0)
            scores = q @ k.permute(0, 2, 3, 1) * scale  # [_ROWS, Hkv, G, _BLOCK]
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            against = higher.masked_fill(higher == -torch.inf, 0.0)
            weights, rest = (scores - against).exp(), (top - against).exp()
            total = total * rest + weights.sum(-1, keepdim=True)
            out = out * rest + weights @ v.transpose(1, 2)
            top = higher
        return out / total.clamp(min=1e-30)
