"""Rows of a step, packed into one int32 buffer: one copy to the device, one message to ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Layout
from foretell.spec.drafter import Rows


@dataclass(frozen=True)
class Batch:
    """Views into one buffer on the device."""

    buffer: Tensor  # [num_words] int32, everything below in one piece
    tokens: Tensor  # [R] int32
    outputs: Tensor  # [O] int32, rows whose logits are wanted
    layout: Layout


def pack(rows: Rows, page_table: np.ndarray, page_size: int, device: torch.device) -> Batch:
    """Packs rows and the page tables they need.

    Args:
        rows: what to run, cells still logical.
        page_table: [max_num_seqs, max_pages] int32, physical pages by slot.
    """
    num_rows, num_outputs = len(rows), len(rows.outputs)
    slots, row_seq = np.unique(np.asarray(rows.slots, dtype=np.int64), return_inverse=True)
    cells = np.asarray(rows.cells, dtype=np.int64)
    num_pages = int(cells.max()) // page_size + 1 if num_rows else 1
    tables = page_table[slots, :num_pages]

    # Ancestors come first: 64-bit words at an even offset.
    sizes = [2 * num_rows, *([num_rows] * 6), num_outputs, tables.size]
    ends = np.cumsum(sizes)
    host = np.empty(int(ends[-1]), dtype=np.int32)
    part = [host[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    part[0].view(np.uint64)[:] = np.asarray(rows.ancestors, dtype=np.uint64)
    part[1][:] = rows.tokens
    part[2][:] = rows.positions
    pages = tables[row_seq, cells // page_size]
    part[3][:] = pages * page_size + cells % page_size
    part[4][:] = row_seq
    part[5][:] = rows.prefix
    part[6][:] = rows.base
    part[7][:] = rows.outputs
    part[8].reshape(tables.shape)[:] = tables

    buffer = torch.from_numpy(host).to(device)
    view = [buffer[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]
    layout = Layout(
        positions=view[2],
        cells=view[3],
        row_seq=view[4],
        prefix=view[5],
        ancestors=view[0].view(torch.int64),
        base=view[6],
        page_table=view[8].view(tables.shape),
        page_size=page_size,
    )
    return Batch(buffer, view[1], view[7], layout)
