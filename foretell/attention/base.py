"""What attention backends share: the layout of a step's rows, and plan/run.

Keys of a row are ordered by their place in the text: the prefix, then its ancestors in the tree.
A backend that promises batch invariance reduces them in that order in fixed blocks from key 0, so
a row's bits depend on nothing else: not on other rows, nor on masks, cells or page order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where each row of a step reads and writes. All int32 but ``ancestors``, on the device."""

    positions: Tensor  # [R] int32, place in the text (RoPE)
    cells: Tensor  # [R] int32, physical cell written: page * page_size + offset
    row_seq: Tensor  # [R] int32, row of `page_table`
    prefix: Tensor  # [R] int32, keys seen unmasked: logical cells 0 .. prefix - 1
    ancestors: Tensor  # [R] int64, bit j (j >= 1): also sees logical cell base + j
    base: Tensor  # [R] int32, logical cell of the root
    page_table: Tensor  # [B, P] int32, physical pages, -1 past the end
    page_size: int

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]


class Attention(Protocol):
    """A backend. `plan` once a step, `run` once a layer. Each layer's cache is a pair of
    [num_pages, Hkv, page_size, D] tensors."""

    def plan(self, layout: Layout) -> None:
        """Work that does not depend on the layer."""
        ...

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Stores k, v [R, Hkv, D] in the rows' cells, converted to the cache's dtype."""
        ...

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attention of q [R, H, D] float32 over each row's own keys.

        Args:
            scale: multiplies the scores.
            window: with a sliding window, a row at position p sees only positions > p - window.

        Returns:
            [R, H, D] float32.
        """
        ...
