"""Rows made fit for an integer product and back.

Two things make 8 bits enough for an activation: outliers are spread over other inputs by a
Hadamard rotation, which the weights undergo too (QuaRot, Ashkboos et al. 2024, online rotation),
and each row is divided by its own largest magnitude. Where that is not fine enough, a row becomes
two: what 8 bits hold of it and what they leave out.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

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


def fit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates each row and divides it by its largest magnitude then.

    Args:
        x: [M, K] float32.

    Returns:
        [M, K + 2] float32 within -1 .. 1, whose last two columns are -1 and 1, and the magnitudes
        [M] float32: 0 where the row is zero, NaN (and the row zero) where it is not finite.
    """
    rows, width = x.shape
    out, scale = torch.empty(rows, width + 2), torch.empty(rows)
    _kernels().fit(x.contiguous().numpy(), out.numpy(), scale.numpy(), stages(width))
    return out, scale


def split_rows(fitted: Tensor) -> Tensor:
    """Each row as two: the nearest of 255 levels, and the rest, magnified to -1 .. 1.

    Args:
        fitted: [M, K + 2] float32 from `fit_rows`.

    Returns:
        [2 * M, K + 2] float32, first all coarse rows, whose entries 8 bits hold exactly.
    """
    out = torch.empty(2 * len(fitted), fitted.shape[1])
    _kernels().split(fitted.numpy(), out.numpy(), STEP)
    return out


def join_rows(y: Tensor) -> Tensor:
    """Products of `split_rows`, [2 * M, N], added up again: [M, N]."""
    _kernels().join(y.numpy(), STEP)
    return y[: len(y) // 2]


def unfit_rows(y: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """y [M, N] * scale [M, 1] + bias [N], in place.

    Few rows take a compiled loop, many torch with its threads: the same two roundings each.
    """
    if len(y) <= _FEW:
        if bias is None:
            _kernels().unfit(y.numpy(), scale.numpy())
        else:
            _kernels().unfit_add(y.numpy(), scale.numpy(), bias.numpy())
        return y
    y.mul_(scale[:, None])
    return y if bias is None else y.add_(bias)
