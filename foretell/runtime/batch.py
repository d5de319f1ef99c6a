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
    num_rows = len(rows)
    slots = sorted(set(rows.slots))
    place = {slot: at for at, slot in enumerate(slots)}
    row_seq = [place[slot] for slot in rows.slots]
    num_pages = max(rows.cells, default=0) // page_size + 1
    tables = page_table[slots, :num_pages]
    cells = np.array(rows.cells, dtype=np.int32)
    pages, offsets = np.divmod(cells, page_size)
    cells = tables[row_seq, pages] * page_size + offsets

    # Ancestors come first: 64-bit words at an even offset.
    host = np.concatenate(
        [
            np.array(rows.ancestors, dtype=np.uint64).view(np.int32),
            np.array(
                [*rows.tokens, *rows.positions, *row_seq, *rows.prefix, *rows.base, *rows.outputs],
                dtype=np.int32,
            ),
            cells,
            tables.ravel(),
        ]
    )
    sizes = [2 * num_rows, *([num_rows] * 5), len(rows.outputs), num_rows, tables.size]
    buffer = torch.from_numpy(host).to(device)
    ancestors, tokens, positions, seq, prefix, base, outputs, where, table = buffer.split(sizes)
    layout = Layout(
        positions=positions,
        cells=where,
        row_seq=seq,
        prefix=prefix,
        ancestors=ancestors.view(torch.int64),
        base=base,
        page_table=table.view(tables.shape),
        page_size=page_size,
    )
    return Batch(buffer, tokens, outputs, layout)
