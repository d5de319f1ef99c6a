"""Rows made fit for an integer product and back.

Two things make 8 bits enough for an activation: outliers are spread over other inputs by a
Hadamard rotation, which the weights undergo too (QuaRot, Ashkboos et al. 2024, online rotation),
and each row is divided by its own largest magnitude. Where that is not fine enough, a row becomes
two: what 8 bits hold of it and what they leave out.
"""

from __future__ import annotations

import threading
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor


class _Kept(threading.local):
    """Buffers of one thread, by (rows, width, fine): tensors and the same memory as arrays."""

    def __init__(self) -> None:
        self.buffers: dict[
            tuple[int, int, bool], tuple[Tensor, Tensor, np.ndarray, np.ndarray]
        ] = {}


_kept = _Kept()
_KEPT = 64
_NONE = np.empty(0, np.float32)
_FEW = 32
STEP = 2 / 255
"""Between two levels of an 8-bit number from -1 to 1."""
_STAGES = 6
"""Each stage halves what an outlier holds of a row's energy; the gain ends at about 64 inputs."""


@cache
def _kernels() -> ModuleType:
    from foretell.models import row_kernels

    return row_kernels


def stages(width: int) -> int:
    """How often a row of that width is folded: at most `_STAGES`, as long as halves are whole."""
    count = 0
    while count < _STAGES and width % (2 << count) == 0:
        count += 1
    return count


def rotate(x: Tensor) -> Tensor:
    """The rotation of rows [M, K] in torch, without its factor 2 ** (-stages / 2)."""
    half = x.shape[1]
    for _ in range(stages(x.shape[1])):
        half //= 2
        pairs = x.reshape(len(x), -1, 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([low + high, low - high], dim=2).reshape(len(x), -1)
    return x


def fit_rows(x: Tensor, *, fine: bool = False) -> tuple[Tensor, Tensor]:
    """Rotates each row and divides it by its largest magnitude then.

    Args:
        x: [M, K] float32.
        fine: each row as two: the nearest of 255 levels, which 8 bits hold exactly, and the rest,
            magnified to -1 .. 1.

    Returns:
        [M, K + 2] float32 within -1 .. 1 (with ``fine`` [2 * M, K + 2], all coarse rows first),
        whose last two columns are -1 and 1, and the magnitudes [M] float32: 0 where the row is
        zero, NaN (and the row zero) where it is not finite. Both are this thread's own and good
        until its next call: in a decode step making them anew costs more than filling them.
    """
    rows, width = x.shape
    buffers = _kept.buffers
    found = buffers.get((rows, width, fine))
    if found is None:
        if len(buffers) > _KEPT:
            buffers.clear()
        out, scale = torch.empty((1 + fine) * rows, width + 2), torch.empty(rows)
        found = buffers[rows, width, fine] = out, scale, out.numpy(), scale.numpy()
    out, scale, out_array, scale_array = found
    _kernels().fit(x.contiguous().numpy(), out_array, scale_array, stages(width), STEP)
    return out, scale


def unfit_rows(y: Tensor, scale: Tensor, bias: Tensor | None, *, fine: bool = False) -> Tensor:
    """Products of `fit_rows`' rows, in place: y [M, N] * scale [M, 1] + bias [N]; with ``fine``
    the two halves of y [2 * M, N] are added up first.

    Few rows take a compiled loop, many torch with its threads: the same roundings each.
    """
    rows = len(scale)
    if fine or rows <= _FEW:
        _kernels().unfit(y.numpy(), scale.numpy(), _NONE if bias is None else bias.numpy(), STEP)
        return y[:rows] if fine else y
    y.mul_(scale[:, None])
    return y if bias is None else y.add_(bias)
