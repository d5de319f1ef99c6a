"""How a head's compiled pass begins: its feature out of the target's layers, then pairs of that
and an embedding, fitted for the first product.

`start` says of what. [0:6] the product that mixes the two (0: none): addresses of weights, scale
and bias, K padded, bytes of a panel and panels. [6] and [7] addresses of the norms of embedding and
feature (0: none). [8] how many parts of the tapped layers are normed by themselves. [9] whether the
first residual is the normed feature. [10:16] and [16:22] the products that make a feature of many
layers; the second (0: none) is added to the last of them. [22] address of those parts' norms (0:
none). [23] outputs of the first of these products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.attention.jit import jit
from foretell.attention.row_kernels import add_row, norm_row
from foretell.attention.together import LINE, fetch_add, meet
from foretell.models.products import fit_row, floats, multiply, read_row
from foretell.models.quant import PANEL

HANDED_OUT = 5
"""Counters that `begin` takes."""


@jit()
def normed(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """A row's norm; the row itself where the weight is empty."""
    if weight.shape[0]:
        norm_row(x, weight, eps, out)
    else:
        for d in range(x.shape[0]):
            out[d] = x[d]


@jit()
def _through(product: Any, of: Any, fitted: Any, stride: Any, rows: Any, out: Any, at: Any) -> None:
    """Fitted rows times the matrix that `of` [6] describes; `at`: of the counter."""
    multiply(
        product, fitted, stride, rows, of[0], of[3], of[4], of[5], of[1], of[2], out,
        PANEL * of[5], at,
    )  # fmt: skip


@jit()
def _fuse(
    fit: Any, product: Any, start: Any, tapped: Any, eps: Any, temp: Any, fitted: Any, stride: Any,
    wide: Any, out: Any, sync: Any, counter: Any, piece: Any, share: Any, shares: Any,
) -> None:  # fmt: skip
    """The feature [R, H] of tapped layers [R, taps * H]."""
    (rows, width), total, parts = out.shape, tapped.shape[1], start[8]
    down, up, rank = start[10:16], start[16:22], start[23]
    weight = floats(start[22], total if start[22] else 0)
    while True:
        first = fetch_add(counter, piece)
        if first >= rows:
            break
        for row in range(first, min(first + piece, rows)):
            for part in range(parts):
                own = slice(part * (total // parts), (part + 1) * (total // parts))
                normed(tapped[row, own], weight[own], eps, temp[own])
            fit_row(fit, temp.ctypes.data, 0, total, fitted + row * stride, down[3])
            out[row] = temp[total - width : total]
            if not up[0]:
                out[row] = 0
    meet(sync, shares)
    _through(product, down, fitted, stride, rows, wide, counter + LINE)
    meet(sync, shares)
    across = PANEL * down[5]
    if up[0]:
        for row in range(share, rows, shares):
            fit_row(fit, wide + 4 * row * across, 0, rank, fitted + row * stride, up[3])
        meet(sync, shares)
        across = PANEL * up[5]
        _through(product, up, fitted, stride, rows, wide, counter + 2 * LINE)
        meet(sync, shares)
    for row in range(share, rows, shares):
        add_row(floats(wide + 4 * row * across, width), out[row])
    meet(sync, shares)


@jit()
def _pair(
    fit: Any, read: Any, ends: Any, start: Any, tokens: Any, features: Any, x: Any, temp: Any,
    eps: Any, fitted: Any, stride: Any, padded: Any, counter: Any, piece: Any,
) -> None:  # fmt: skip
    """Fits each token's embedding and feature side by side, with their norms. x, which features
    may be too, becomes the residual where no product mixes the two (EAGLE-3), else zeros that its
    outputs are added to."""
    rows, width = x.shape
    before = floats(start[6], width if start[6] else 0)
    behind = floats(start[7], width if start[7] else 0)
    while True:
        first = fetch_add(counter, piece)
        if first >= rows:
            return
        for row in range(first, min(first + piece, rows)):
            out = temp.ctypes.data
            read_row(read, ends[0], ends[1], ends[2], ends[3], np.int64(tokens[row]), width, out)
            normed(temp[:width], before, eps, temp[:width])
            normed(features[row], behind, eps, temp[width : 2 * width])
            fit_row(fit, out, 0, 2 * width, fitted + row * stride, padded)
            for d in range(width):
                residual = temp[width + d] if start[9] else features[row, d]
                x[row, d] = np.float32(0) if start[0] else residual


@jit()
def begin(
    formats: Any, ends: Any, start: Any, tokens: Any, features: Any, x: Any, eps: Any, fitted: Any,
    stride: Any, wide: Any, sync: Any, counter: Any, piece: Any, share: Any, shares: Any,
) -> None:  # fmt: skip
    """Up to the first layer's input: fitted, or in `wide` what is to be added to x. Arguments as
    `compiled.run` has them; features [R, H] are as they are, wider ones are layers."""
    fit, product, (rows, width) = formats[0], formats[1], x.shape
    temp = np.empty(max(2 * width, features.shape[1]) + 64, np.float32)
    if features.shape[1] > width:
        _fuse(
            fit, product, start, features, eps, temp, fitted, stride, wide, x, sync, counter,
            piece, share, shares,
        )  # fmt: skip
        features = x
    _pair(
        fit, formats[2], ends, start, tokens, features, x, temp, eps, fitted, stride, start[3],
        counter + 3 * LINE, piece,
    )  # fmt: skip
    if start[0]:
        meet(sync, shares)
        _through(product, start, fitted, stride, rows, wide, counter + 4 * LINE)
