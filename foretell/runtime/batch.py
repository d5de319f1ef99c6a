"""Rows of a step, packed into one int32 buffer: one copy to the device, one message to ranks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Layout
from foretell.placed import put
from foretell.spec.drafter import Rows

HEADER = 6
"""Words that say how much of everything follows: rows, outputs, sequences, pages of each, moves;
and what runs them."""
TARGET, HEAD, FOLLOW = range(3)
"""The target; a head; a head on the target's last rows, of which nothing follows."""


@dataclass(frozen=True)
class Batch:
    """Views into one buffer on the device."""

    buffer: Tensor  # [num_words] int32, everything below in one piece
    tokens: Tensor  # [R] int32
    outputs: Tensor  # [O] int32, rows whose logits are wanted
    layout: Layout
    moves: Tensor  # [2, M] int32, physical cells to copy from and to before the pass


def pack(rows: Rows, page_table: np.ndarray, page_size: int) -> np.ndarray:
    """Packs rows and the page tables they need.

    Args:
        rows: what to run, cells still logical.
        page_table: [max_num_seqs, max_pages] int32, physical pages by slot.

    Returns:
        [num_words] int32, which `view` reads.
    """
    num_rows = len(rows)
    slots = sorted(set(rows.slots))
    place = {slot: at for at, slot in enumerate(slots)}
    row_seq = [place[slot] for slot in rows.slots]
    num_pages = max(rows.cells, default=0) // page_size + 1
    tables, page_of = page_table.take(slots, 0)[:, :num_pages], page_table.item
    cells = [
        page_of(slot, cell // page_size) * page_size + cell % page_size
        for slot, cell in zip(rows.slots, rows.cells, strict=True)
    ]
    parts = (rows.tokens, rows.positions, row_seq, rows.prefix, rows.base, rows.outputs, cells)
    sizes = [num_rows, len(rows.outputs), len(slots), num_pages, 0, 0]
    assert len(sizes) == HEADER
    # Ancestors come first: 64-bit words at an even offset.
    return np.concatenate(
        [
            np.array(sizes, dtype=np.int32),
            np.array(rows.ancestors, dtype=np.uint64).view(np.int32),
            np.array(
                [n for part in parts for n in part],
                dtype=np.int32,
            ),
            tables.ravel(),
        ]
    )


def fill(words: np.ndarray, batch: Batch, tokens: SequenceOf[int]) -> None:
    """Writes tokens [R] into a buffer that was packed without them, and into its view."""
    first = HEADER + 2 * len(tokens)
    words[first : first + len(tokens)] = tokens
    if batch.tokens.device.type != "cpu":  # there the two are one memory
        batch.tokens.copy_(put(words[first : first + len(tokens)], batch.tokens.device))


def with_moves(words: np.ndarray, moves: SequenceOf[SequenceOf[int]]) -> np.ndarray:
    """The same buffer, behind these moves."""
    if not moves[0]:
        return words
    assert not words[4]
    words = np.concatenate([words, np.array([*moves[0], *moves[1]], dtype=np.int32)])
    words[4] = len(moves[0])
    return words


def view(words: np.ndarray, page_size: int, device: torch.device) -> Batch:
    """A batch out of what `pack` made, copied to the device in one piece."""
    num_rows, num_outputs, num_seqs, num_pages, num_moves, _ = words[:HEADER].tolist()
    buffer = put(words, device)
    _, ancestors, tokens, positions, seq, prefix, base, outputs, cells, table, moves = buffer.split(
        [
            HEADER, 2 * num_rows, *([num_rows] * 5), num_outputs, num_rows, num_seqs * num_pages,
            2 * num_moves,
        ]
    )  # fmt: skip
    layout = Layout(
        positions=positions,
        cells=cells,
        row_seq=seq,
        prefix=prefix,
        ancestors=ancestors.view(torch.int64),
        base=base,
        page_table=table.view(num_seqs, num_pages),
        page_size=page_size,
    )
    return Batch(buffer, tokens, outputs, layout, moves.view(2, num_moves))
