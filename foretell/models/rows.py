"""Rows made fit for an integer product and back: each is divided by its largest magnitude.

Few rows take compiled loops, many take torch with its threads. Both give the same bits: a maximum
is exact in any order, and every other step is one correctly rounded operation for each element.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

_FEW = 32
_SMALLEST = 1e-30
"""Rows without a larger magnitude count as zero: their reciprocal would not be a number."""


@cache
def _kernels() -> ModuleType:
    from foretell.models import row_kernels

    return row_kernels


def fit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divides each row by its largest magnitude.

    Args:
        x: [M, K] float32.

    Returns:
        [M, K + 2] float32 within -1 .. 1, whose last two columns are -1 and 1, and the magnitudes
        [M] float32: 0 where the row is zero, NaN (and the row zero) where it is not finite.
    """
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty(rows, width + 2)
    if rows <= _FEW:
        scale = torch.empty(rows)
        _kernels().fit(x.numpy(), out.numpy(), scale.numpy())
        return out, scale
    scale = x.abs().amax(dim=1)
    finite = scale.isfinite()
    usable = finite & (scale >= _SMALLEST)
    inverse = torch.where(usable, 1.0 / scale, 0.0)
    torch.mul(x, inverse[:, None], out=out[:, :width])
    out[:, :width].clamp_(-1.0, 1.0)
    if not usable.all():
        out[~usable] = 0.0
        scale = torch.where(usable, scale, torch.where(finite, 0.0, torch.nan))
    out[:, width] = -1.0
    out[:, width + 1] = 1.0
    return out, scale


def unfit_rows(y: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """y [M, N] * scale [M, 1] + bias [N], in place."""
    if len(y) <= _FEW:
        if bias is None:
            _kernels().unfit(y.numpy(), scale.numpy())
        else:
            _kernels().unfit_add(y.numpy(), scale.numpy(), bias.numpy())
        return y
    y.mul_(scale[:, None])
    return y if bias is None else y.add_(bias)
