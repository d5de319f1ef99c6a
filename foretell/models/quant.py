"""Matrix products whose rows do not know of each other, one class for each weight format.

A row's result must have the same bits alone, in a batch, as a prompt chunk or as a tree node:
without it speculation changes texts wherever two tokens are nearly tied. Two ways lead there:

* integer sums are exact in any order (int8);
* a product of a fixed number of rows always takes the same path (bf16, f32), and each row's sum
  is independent of the other rows within it. The tests in tests/models hold every format to it.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.config import Weights
from foretell.models.rows import fit_rows, rotate, stages, unfit_rows

_BLOCK = 16
"""Rows of every bf16 and f32 product. Part of the result's bits: other sizes round otherwise."""
_GROUP = 32
"""int4: weights that share a scale and a zero point."""
_CHUNK = 4096
"""Weight rows quantised at a time: bounds temporary memory."""


class Linear(Protocol):
    """``linear(x [M, K] float32) -> [M, N] float32``, batch invariant."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Embedding(Protocol):
    """``embedding(tokens [R]) -> [R, H] float32``."""

    def __call__(self, tokens: Tensor, /) -> Tensor: ...


class Table:
    """Embedding rows kept as they are (float32 or bfloat16)."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [V, H]

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].float()


class Int8Table:
    """Embedding rows in int8 with a scale for each `_GROUP` elements; padded with zeros."""

    __slots__ = ("scale", "weight", "width")

    def __init__(self, weight: Tensor) -> None:
        rows, self.width = weight.shape
        groups = -(-self.width // _GROUP)
        self.weight = torch.empty(rows, groups * _GROUP, dtype=torch.int8)
        self.scale = torch.empty(rows, groups, 1)
        for start in range(0, rows, _CHUNK):
            part = F.pad(weight[start : start + _CHUNK].float(), (0, -self.width % _GROUP))
            levels, scale = quantize_int8(part.view(-1, _GROUP))
            self.weight[start : start + _CHUNK] = levels.view(part.shape)
            self.scale[start : start + _CHUNK] = scale.view(len(part), groups, 1)

    def __call__(self, tokens: Tensor) -> Tensor:
        groups = self.weight[tokens].view(len(tokens), -1, _GROUP)
        out = groups.float().mul_(self.scale[tokens]).view(len(tokens), -1)
        return out[:, : self.width].contiguous()


class FloatLinear:
    """Weights in bfloat16 or float32; the sum runs over blocks of `_BLOCK` rows, zero padded.

    Weights are padded to multiples of `_BLOCK` too: vendor libraries compute what is left over
    beside their tiles with other kernels, and which rows those meet is not ours to know.
    """

    __slots__ = ("bias", "out_features", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features = len(weight)
        self.weight = _whole_blocks(weight)  # [N, K]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        (rows, inputs), weight = x.shape, self.weight
        # A fresh buffer also fixes the alignment, which vendor libraries may choose paths by.
        padded = torch.zeros(-(-rows // _BLOCK) * _BLOCK, weight.shape[1], dtype=weight.dtype)
        padded[:rows, :inputs] = x
        if len(padded) == _BLOCK:
            out = F.linear(padded, weight)
        else:
            out = torch.cat(
                [F.linear(block, weight) for block in padded.split(_BLOCK)]
                or [padded.new_empty(0, len(weight))]
            )
        out = out[:rows, : self.out_features].float().contiguous()
        return out if self.bias is None else out.add_(self.bias)


def _whole_blocks(weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    if outputs % _BLOCK or inputs % _BLOCK:
        return F.pad(weight, (0, -inputs % _BLOCK, 0, -outputs % _BLOCK))
    return weight.contiguous()


_int8_product = torch.ops.quantized.linear_dynamic.default


class Int8Linear:
    """int8 weights (one scale an output), int8 activations (one scale a row), integer sums.

    Inputs are rotated on both sides (see `rows`). FBGEMM takes one scale for all rows from the
    largest and smallest element: so every row is divided by its own largest magnitude, and two
    columns that meet zero weights hold -1 and +1. The scale is then a constant, and each row is
    quantised as if it were alone.

    Args:
        fine: 16 bits for the activations, as two rows of 8.
    """

    __slots__ = ("_fine", "_packed", "bias", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, fine: bool = False) -> None:
        quantized, scale = quantize_int8(weight, rotated=True)
        quantized = F.pad(quantized, (0, 2))
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():  # torch means to move these operators, not to drop them
            warnings.simplefilter("ignore")
            tensor = torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateImportUsage]
                quantized, scale.double(), zeros, 0
            )
        self._packed = torch.ops.quantized.linear_prepack(tensor, None)
        self._fine = fine
        self.bias = bias
        self.out_features = len(scale)

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.out_features)
        fitted, scale = fit_rows(x, fine=self._fine)
        out = _int8_product(fitted, self._packed, False)
        return unfit_rows(out, scale, self.bias, fine=self._fine)


class Int4Linear:
    """4-bit weights, a scale and a zero point for each `_GROUP` inputs; bfloat16 activations.

    Each row is summed by itself whatever their number, so no blocks are needed.
    """

    __slots__ = ("_packed", "_padding", "_scales", "bias", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, inputs = weight.shape
        self._padding = -inputs % _GROUP
        packed: list[Tensor] = []
        scales: list[Tensor] = []
        for rows in weight.split(_CHUNK):
            rows = F.pad(rows.float(), (0, self._padding, 0, -len(rows) % 16))
            levels, scale = quantize_int4(rows)
            packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1))
            scales.append(scale)
        self._packed = torch.cat(packed)
        self._scales = torch.cat(scales, dim=1)  # [K / G, N, 2] bfloat16
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.out_features)
        x = x.bfloat16()
        if self._padding:
            x = F.pad(x, (0, self._padding))
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, _GROUP, self._scales)
        out = out[:, : self.out_features].float().contiguous()
        return out if self.bias is None else out.add_(self.bias)


def quantize_int8(weight: Tensor, rotated: bool = False) -> tuple[Tensor, Tensor]:
    """Symmetric, one scale a row: weight [N, K] -> levels [N, K] int8, scale [N] float32.

    Args:
        rotated: rotate the rows first, by the inverse of what `fit_rows` does to activations.
    """
    levels = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for start in range(0, len(weight), _CHUNK):
        rows = weight[start : start + _CHUNK].float()
        if rotated:
            rows = rotate(rows) / 2 ** stages(rows.shape[1])
        step = (rows.abs().amax(dim=1) / 127).clamp_(min=1e-30)
        scale[start : start + _CHUNK] = step
        levels[start : start + _CHUNK] = (rows / step[:, None]).round_().clamp_(-127, 127)
    return levels, scale


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Asymmetric, 16 levels for each group of `_GROUP` inputs; the range is cut in by the share
    that leaves the least squared error.

    Args:
        weight: [N, K] float32, K a multiple of `_GROUP`.

    Returns:
        levels [N, K] int32 and [K / G, N, 2] bfloat16 (scale, value of level 8).
    """
    groups = weight.reshape(len(weight), -1, _GROUP)  # [N, K / G, G]
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    best_levels = torch.zeros(groups.shape, dtype=torch.int32)
    best_scale, best_zero = torch.zeros_like(low), torch.zeros_like(low)
    best_error = torch.full_like(low, torch.inf)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        middle, half = (high + low) / 2, (high - low) / 2 * share
        scale = (2 * half / 15).clamp(min=1e-12).bfloat16().float()
        zero = (middle + scale / 2).bfloat16().float()  # level 8 is half a step above the middle
        levels = ((groups - zero) / scale + 8).round_().clamp_(0, 15)
        error = ((levels - 8) * scale + zero - groups).square_().sum(dim=2, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
        best_levels = torch.where(better, levels.int(), best_levels)
    scales = torch.cat([best_scale, best_zero], dim=2).transpose(0, 1).bfloat16()
    return best_levels.reshape(weight.shape), scales.contiguous()


def make_linear(
    weights: Weights, weight: Tensor, bias: Tensor | None = None, *, outliers: bool = False
) -> Linear:
    """Puts weight [N, K] (any float dtype) into a format; bias [N] stays float32.

    Args:
        outliers: the inputs are products and hold outliers (a layer's ``down``): int8 then takes
            16 bits for them, which takes a third off the error of the model's log-probabilities.
    """
    bias = None if bias is None else bias.float()
    if weights == "int8":
        return Int8Linear(weight, bias, fine=outliers)
    if weights == "int4":
        return Int4Linear(weight, bias)
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    return FloatLinear(weight.to(dtype), bias)


def make_embedding(
    weights: Weights, table: Tensor, head: Tensor | None
) -> tuple[Embedding, Linear]:
    """Embedding and output projection.

    Args:
        table: [V, H] any float dtype.
        head: [V, H], or None where both are one tensor: kept once in bf16 and f32; the packed
            formats need a second form of it in any case, so int8 rows serve the embedding.
    """
    if weights in ("int8", "int4"):
        return Int8Table(table), make_linear(weights, table if head is None else head)
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    embedding = Table(table.to(dtype).contiguous())
    return embedding, make_linear(weights, embedding.weight if head is None else head)
