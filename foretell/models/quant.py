"""Weights turned into a format and laid out for the kernels, and the same arithmetic in torch.

tiles.py has the layout and what a product computes. int8: rows of weights are turned by a
Hadamard matrix of 16 and have one scale each. int4: levels 0 to 15 with a float16 scale and
minimum for every 32 inputs, as in GGUF's Q4_1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.config import Weights

PANEL = 32
"""Outputs that are laid out together."""
GROUP: dict[Weights, int] = {"f32": 64, "bf16": 64, "int8": 64, "int4": 32}
"""Inputs that share an activation scale; rows and weights are padded to whole groups."""
TURNED = 16
"""Inputs that are turned together in int8."""
_CHUNK = 4096
"""Weight rows quantised at a time: bounds temporary memory."""


class Packed(NamedTuple):
    """A matrix in its format, padded."""

    weights: Tensor  # [panels, bytes of a panel] uint8
    scale: Tensor  # [panels * PANEL] float32, of each output


def pack(kind: Weights, weight: Tensor) -> Packed:
    """Puts weight [N, K] of any float dtype into a format."""
    parts = [_pack(kind, rows) for rows in weight.split(_CHUNK)]
    return Packed(torch.cat([p.weights for p in parts]), torch.cat([p.scale for p in parts]))


def _pack(kind: Weights, weight: Tensor) -> Packed:
    weight = F.pad(weight, (0, -weight.shape[1] % GROUP[kind], 0, -len(weight) % PANEL))
    scale = weight.new_ones(len(weight), dtype=torch.float32)
    if kind == "int4":
        return Packed(_pack_int4(*quantize_int4(weight.float())), scale)
    if kind == "int8":
        levels, scale = quantize_int8(turn(weight.float()) / TURNED)
        weight = levels.view(torch.uint8) ^ 128  # levels + 128
    elif kind == "bf16":
        weight = weight.bfloat16().view(torch.uint16)
    else:
        weight = weight.float()
    step = 4 // weight.element_size()
    tiles = weight.view(len(weight) // PANEL, 2, PANEL // 2, -1, step)
    tiles = tiles.permute(0, 3, 1, 2, 4).contiguous()  # [panels, K / step, 2, 16, step]
    return Packed(tiles.view(torch.uint8).reshape(len(tiles), -1), scale)


def _pack_int4(levels: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """levels [N, K], scale and least [N, K / 32]: input 4 j + i of a group shares a byte with
    input 16 + 4 j + i, which has the high half."""
    panels = len(levels) // PANEL
    halves = levels.to(torch.uint8).view(panels, 2, 16, -1, 2, 4, 4)
    low, high = halves.unbind(4)  # [panels, 2, 16, K / 32, 4, 4]
    bytes_ = (low | (high << 4)).permute(0, 3, 1, 4, 2, 5)  # [panels, K / 32, 2, 4, 16, 4]
    bytes_ = bytes_.reshape(*bytes_.shape[:3], -1)
    extra = torch.stack([scale, least]).half().view(2, panels, 2, 16, -1)
    extra = extra.permute(1, 4, 2, 0, 3).contiguous()  # [panels, K / 32, 2, 2, 16]
    extra = extra.view(torch.uint8).reshape(*bytes_.shape[:3], -1)
    return torch.cat([bytes_, extra], dim=3).reshape(panels, -1)


def unpack(kind: Weights, packed: Packed, rows: int, width: int) -> Tensor:
    """The weights [rows, width] float32 that a packed matrix stands for (int8: turned)."""
    data = packed.weights
    panels = len(data)
    if kind == "int4":
        groups = data.view(panels, -1, 2, 320)
        pairs = groups[..., :256].reshape(*groups.shape[:3], 4, 16, 4)
        levels = torch.stack([pairs & 15, pairs >> 4], dim=3)  # [panels, G, 2, 2, 4, 16, 4]
        extra = groups[..., 256:].contiguous().view(torch.float16).float()
        scale, least = extra.view(*groups.shape[:3], 2, 16).unbind(3)  # [panels, G, 2, 16]
        levels = levels.permute(0, 1, 2, 5, 3, 4, 6).reshape(*scale.shape, 32).float()
        values = levels * scale[..., None] + least[..., None]
        values = values.permute(0, 2, 3, 1, 4)  # [panels, 2, 16, G, 32]
    else:
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[kind]
        step = 4 // dtype.itemsize
        values = data.view(dtype).view(panels, -1, 2, 16, step).permute(0, 2, 3, 1, 4).float()
        if kind == "int8":
            values = values - 128
    values = values.reshape(panels * PANEL, -1) * packed.scale[:, None]
    return values[:rows] if kind == "int8" else values[:rows, :width]


def select(kind: Weights, packed: Packed, rows: Tensor) -> Packed:
    """Rows [M] int64 of a packed matrix as a packed matrix of their own, bit for bit."""
    data = packed.weights
    panels, panel = len(data), rows // PANEL
    tile, lane = rows % PANEL // 16, rows % 16
    scale = F.pad(packed.scale[rows], (0, -len(rows) % PANEL))

    def laid_out(items: Tensor) -> Tensor:
        """[M, steps, parts, bytes] -> [panels, steps, 2, parts * 16 * bytes]"""
        items = F.pad(items, (0, 0, 0, 0, 0, 0, 0, -len(items) % PANEL))
        items = items.view(len(items) // PANEL, 2, 16, *items.shape[1:])
        return items.permute(0, 3, 1, 4, 2, 5).flatten(3)

    if kind != "int4":
        steps = data.view(panels, -1, 2, 1, 16, 4)
        tiles = laid_out(steps[panel, :, tile, :, lane])
    else:
        groups = data.view(panels, -1, 2, 320)
        levels = groups[..., :256].unflatten(3, (4, 16, 4))[panel, :, tile, :, lane]
        extra = groups[..., 256:].unflatten(3, (2, 16, 2))[panel, :, tile, :, lane]
        tiles = torch.cat([laid_out(levels), laid_out(extra)], dim=3)
    return Packed(tiles.reshape(len(tiles), tiles[:1].numel() or 1), scale)


def fit(kind: Weights, x: Tensor) -> Tensor:
    """What a product takes of rows x [M, K] float32, as float32 [M, K] (int8: turned and padded).
    The kernels' `fit` in torch."""
    if kind == "f32":
        return x
    if kind == "bf16":
        return x.bfloat16().float()
    width, group = x.shape[1], GROUP[kind]
    x = F.pad(x, (0, -width % group))
    if kind == "int8":
        x = turn(x)
    groups = x.view(len(x), -1, group)
    top = groups.abs().amax(dim=2, keepdim=True)
    levels = torch.where(top == 0, top, groups * (127 / top)).round()
    fitted = (levels * (top * (1 / 127))).view(x.shape)
    return fitted if kind == "int8" else fitted[:, :width]


def turn(x: Tensor) -> Tensor:
    """Every `TURNED` neighbours of x [M, K] times a Hadamard matrix of ones and minus ones, which
    spreads an outlier over all of them (QuaRot, Ashkboos et al. 2024); K a multiple of it."""
    shape, half = x.shape, 1
    while half < TURNED:
        low, high = x.reshape(-1, 2, half).unbind(1)
        x = torch.stack([low + high, low - high], dim=1)
        half *= 2
    return x.reshape(shape)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric, one scale a row: weight [N, K] -> levels [N, K] int8, scale [N] float32."""
    scale = (weight.abs().amax(dim=1) / 127).clamp_(min=1e-30)
    return (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sixteen levels for each group of 32 inputs; the range is cut in by the share that leaves the
    least squared error.

    Args:
        weight: [N, K] float32, K a multiple of 32.

    Returns:
        levels [N, K] uint8, scale and least [N, K / 32] float32 that float16 holds exactly: a
        weight is level * scale + least.
    """
    groups = weight.reshape(len(weight), -1, GROUP["int4"])  # [N, K / 32, 32]
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    best = torch.zeros_like(groups, dtype=torch.uint8)
    best_scale, best_least = torch.zeros_like(low), torch.zeros_like(low)
    best_error = torch.full_like(low, torch.inf)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        middle, half = (high + low) / 2, (high - low) / 2 * share
        scale = (2 * half / 15).half().float()
        least = (middle - half).half().float()
        levels = torch.where(scale > 0, (groups - least) / scale, 0.0).round_().clamp_(0, 15)
        error = (levels * scale + least - groups).square_().sum(dim=2, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_least = torch.where(better, least, best_least)
        best = torch.where(better, levels.to(torch.uint8), best)
    return best.reshape(weight.shape), best_scale[..., 0], best_least[..., 0]
