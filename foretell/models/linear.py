"""Matrix products whose rows do not know of each other, and embeddings.

A row's result must have the same bits alone, in a batch, as a prompt chunk or as a tree node:
without it speculation changes texts wherever two tokens are nearly tied. The compiled products sum
each output of each row by itself, in order; where there is no compiler, torch products of a fixed
number of rows do. The tests in tests/models hold every format to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.attention.compiler import have_compiler
from foretell.attention.pool import num_threads, together
from foretell.config import Weights
from foretell.models.quant import GROUP, PANEL, Packed, fit, pack, select, turn, unpack

_WORTH_A_THREAD = 4_000_000
"""Multiply-adds from which a second thread pays for waking it."""
_BLOCK = 16
"""Rows of a product without a compiler: part of the result's bits."""


class Linear(Protocol):
    """``linear(x [M, K] float32) -> [M, N] float32``, batch invariant."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Embedding(Protocol):
    """``embedding(tokens [R]) -> [R, H] float32``."""

    def __call__(self, tokens: Tensor, /) -> Tensor: ...


@cache
def products() -> ModuleType | None:
    """The compiled products, None where numba cannot be had."""
    if not have_compiler():
        return None
    from foretell.models import products

    return products


class PackedLinear:
    """A matrix in one of the four formats.

    Args:
        packed: as `pack` made it.
        shape: outputs N and inputs K.
        bias: [N] or None.
    """

    def __init__(
        self, kind: Weights, packed: Packed, shape: tuple[int, int], bias: Tensor | None = None
    ) -> None:
        self.kind: Weights = kind
        self.packed = packed
        self.out_features, self.in_features = shape
        self.padded = -(-self.in_features // GROUP[kind]) * GROUP[kind]
        self.bias = torch.zeros_like(packed.scale)  # [panels * PANEL]
        if bias is not None:
            self.bias[: self.out_features] = bias

    def rows(self, ids: Tensor) -> PackedLinear:
        """A product with only the outputs ids [N] int64, whose bits stay the same."""
        shape = (len(ids), self.in_features)
        return PackedLinear(self.kind, select(self.kind, self.packed, ids), shape, self.bias[ids])

    @property
    def panels(self) -> int:
        return len(self.packed.weights)

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.in_features
        if not len(x):
            return x.new_empty(0, self.out_features)
        if not x.is_cpu or (compiled := products()) is None:
            return self._portable(x)
        rows, width = len(x), self.panels * PANEL
        x, out = x.contiguous(), torch.empty(rows, width)
        stride = compiled.row_bytes(self.kind, self.padded)
        fitted = torch.empty(rows * stride + 64, dtype=torch.uint8)
        work = rows * self.out_features * self.in_features
        # With fewer panels than two pieces a thread, some would only wait, as in a crowd.
        shares = min(num_threads(), self.panels // (2 * compiled.PIECE))
        shares = shares if work > _WORTH_A_THREAD else 1
        sync = np.zeros(compiled.SYNC, np.uint8)
        arguments = (
            *compiled.compile_format(self.kind)[:2], x.data_ptr(), self.in_features, rows,
            -(-fitted.data_ptr() // 64) * 64, stride, self.packed.weights.data_ptr(), self.padded,
            self.packed.weights.shape[1], self.panels, self.packed.scale.data_ptr(),
            self.bias.data_ptr(), out.data_ptr(), width, sync.ctypes.data,
        )  # fmt: skip
        together(compiled.product, arguments, shares, sync, x, fitted, out, self)
        return out[:, : self.out_features].contiguous()

    def _portable(self, x: Tensor) -> Tensor:
        """The same in torch: blocks of `_BLOCK` rows, each row's sum independent of the others."""
        rows = len(x)
        fitted = _whole_blocks(fit(self.kind, x))
        blocks = [F.linear(block, self._dense) for block in fitted.split(_BLOCK)]
        out = torch.cat(blocks)[:rows, : self.out_features]
        return out + self.bias[: self.out_features]

    @cached_property
    def _dense(self) -> Tensor:
        return _whole_blocks(unpack(self.kind, self.packed, self.out_features, self.in_features))


def _whole_blocks(x: Tensor) -> Tensor:
    """Padded both ways: vendor libraries compute what is left over beside their tiles with other
    kernels. A fresh buffer also fixes the alignment, which they may choose paths by."""
    return F.pad(x, (0, -x.shape[1] % _BLOCK, 0, -len(x) % _BLOCK)).clone()


class PackedEmbedding:
    """Rows of a matrix in one of the four formats, read where the output projection has them."""

    def __init__(self, table: PackedLinear) -> None:
        self.table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        table = self.table
        few = select(table.kind, table.packed, tokens.long())
        rows = unpack(table.kind, few, len(tokens), table.in_features)  # [R, H]
        return rows if table.kind != "int8" else turn(rows)[:, : table.in_features].contiguous()


def make_linear(weights: Weights, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Puts weight [N, K] (any float dtype) into a format; bias [N] stays float32."""
    shape = (weight.shape[0], weight.shape[1])
    return PackedLinear(weights, pack(weights, weight), shape, bias)


def packed_tensors(name: str, kind: Weights, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Weight [N, K] in a format, by the names that `stored_linear` asks for."""
    packed = pack(kind, weight)
    yield f"{name}.weights", packed.weights
    yield f"{name}.scale", packed.scale


def stored_linear(
    tensors: Mapping[str, Tensor], name: str, kind: Weights, shape: tuple[int, int]
) -> PackedLinear:
    """The product of what `packed_tensors` made, and of ``NAME.bias`` where there is one."""
    packed = Packed(tensors[f"{name}.weights"], tensors[f"{name}.scale"])
    return PackedLinear(kind, packed, shape, tensors.get(f"{name}.bias"))
