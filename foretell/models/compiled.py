"""A pass as one compiled call a thread: what `Decoder.run` and `Head.run` say in steps.

A step between two products takes a microsecond where calling it from Python takes ten, and
there are three hundred of them. Imported on first use, as numba is slow to import.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.lib.stride_tricks import as_strided

from foretell.attention.jit import carray, intrinsic, jit
from foretell.attention.kernels import attend_any
from foretell.attention.row_kernels import add_row, rope_and_write_any, silu_row
from foretell.attention.together import LINE, fetch_add, meet, ticks
from foretell.models.head_begin import HANDED_OUT, begin, normed
from foretell.models.products import fit_row, float_at, floats, multiply, read_row
from foretell.models.quant import PANEL

LAYER = 4 * 3 + 5
"""Items of a layer in the table: weights, scale and bias of each product (qkv, o, gate_up, down),
then addresses of input norm, post norm, q norm and k norm (0: none), and the window."""
PHASES = (
    "embedding", "norms", "qkv", "rope", "attention", "o", "gate_up", "activation", "down",
    "lm_head",
)  # fmt: skip
_SPAN = 512
"""Inputs of the activation that are one piece of work."""


def sync_bytes(layers: int) -> int:
    """What a pass needs to keep its threads together: the barrier and a counter a hand-out."""
    return LINE * (7 + HANDED_OUT + 9 * layers)


@jit()
def _met(sync: Any, shares: Any, share: Any, spent: Any, phase: Any, before: Any) -> Any:
    """Waits for all threads; the first books the time since `before` on a phase."""
    meet(sync, shares)
    now = ticks()
    if share == 0:
        spent[phase] += now - before
    return now


@intrinsic
def _cache_at(typing: Any, like: Any, address: Any) -> Any:
    """A pointer to numbers as wide as those of the array `like`."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind = ir.IntType(signature.args[0].dtype.bitwidth)
        return b.inttoptr(arguments[1], kind.as_pointer())

    return types.CPointer(like.dtype)(like, types.int64), generate


@jit()
def _matrix(
    run: Any, table: Any, sizes: Any, i: Any, x: Any, stride: Any, rows: Any, out: Any,
    counter: Any, first: Any, end: Any,
) -> None:  # fmt: skip
    """Panels first .. end - 1 of a layer's product i."""
    padded, panel, panels = sizes[3 * i], sizes[3 * i + 1], sizes[3 * i + 2]
    before = 4 * PANEL * first
    multiply(
        run, x, stride, rows, table[3 * i] + first * panel, padded, panel, end - first,
        table[3 * i + 1] + before, table[3 * i + 2] + before, out + before, PANEL * panels, counter,
    )  # fmt: skip


@jit()
def _embed(read: Any, ends: Any, tokens: Any, x: Any, counter: Any, piece: Any) -> None:
    rows, width = x.shape
    while True:
        first = fetch_add(counter, piece)
        if first >= rows:
            return
        for row in range(first, min(first + piece, rows)):
            out = x.ctypes.data + 4 * row * width
            read_row(read, ends[0], ends[1], ends[2], ends[3], np.int64(tokens[row]), width, out)


@jit()
def _norm(
    fit: Any, x: Any, out: Any, temp: Any, weight: Any, eps: Any, delta: Any, width: Any,
    fitted: Any, stride: Any, padded: Any, last: Any, counter: Any, piece: Any,
) -> None:  # fmt: skip
    """Adds a product's outputs to the rows of x and fits, or after the last layer keeps, the
    norms. delta: its address, 0 for none."""
    rows, hidden = x.shape
    while True:
        first = fetch_add(counter, piece)
        if first >= rows:
            return
        for row in range(first, min(first + piece, rows)):
            if delta:
                add_row(floats(delta + 4 * row * width, hidden), x[row])
            if last:
                normed(x[row], weight, eps, out[row])
            else:
                normed(x[row], weight, eps, temp[:hidden])
                fit_row(fit, temp.ctypes.data, 0, hidden, fitted + row * stride, padded)


@jit()
def _activate(
    fit: Any, wide: Any, width: Any, rows: Any, inner: Any, temp: Any, fitted: Any, stride: Any,
    padded: Any, counter: Any, piece: Any,
) -> None:  # fmt: skip
    spans = (inner + _SPAN - 1) // _SPAN
    while True:
        start = fetch_add(counter, piece)
        if start >= rows * spans:
            return
        for item in range(start, min(start + piece, rows * spans)):
            row, first = item // spans, item % spans * _SPAN
            end = min(first + _SPAN, inner)
            gate = wide + 4 * (row * width + first)
            count = end - first
            silu_row(floats(gate, count), floats(gate + 4 * inner, count), temp[:count])
            fit_row(fit, temp.ctypes.data - 4 * first, first, end, fitted + row * stride, padded)


@jit()
def _turn(
    wide: Any, width: Any, heads: Any, kv_heads: Any, at: Any, sizes: Any, cos: Any, sin: Any,
    positions: Any, cells: Any, eps: Any, k_cache: Any, v_cache: Any, counter: Any, piece: Any,
) -> None:  # fmt: skip
    """Norms and rotates q and k in place, and writes k and v to the cache; so many heads of them
    lie in rows at address `wide`."""
    rows, (dim, size) = positions.shape[0], sizes[15:17]
    qkv = carray(float_at(wide), (rows, width))
    q_norm, k_norm = floats(at[14], dim if at[14] else 0), floats(at[15], dim if at[15] else 0)
    while True:
        first = fetch_add(counter, piece)
        if first >= rows:
            return
        end = min(first + piece, rows)
        rope_and_write_any(
            qkv[first:end], cos, sin, positions[first:end], q_norm, k_norm, eps, heads,
            kv_heads, k_cache, v_cache, cells[first:end], size, dim,
        )  # fmt: skip


@jit()
def run(
    formats: Any,  # [5]: addresses of layers' fit and multiply, embedding's read, lm_head's two
    ends: Any,  # [4 + 6]: embedding and lm_head, see `WholePass`
    start: Any,  # [24]: see `head_begin`
    features: Any,  # [R, H or taps * H] of a head, [0, 0] of a decoder
    bits: Any,  # an empty array of the caches' width, uint16 or uint32
    tokens: Any,  # [R]
    outputs: Any,  # [O], rows whose logits are wanted
    logits: Any,  # [O, V padded]
    x: Any,  # [R, H], the residual stream
    hidden: Any,  # [R, H] after the final norm, [O, H] if narrow
    tapped: Any,  # [R, taps * H]; the last layer's are [O, H] if narrow
    taps: Any,  # [layers]: place in tapped, or -1
    table: Any,  # [layers + 1, LAYER]: addresses; the last has the final norm only
    caches: Any,  # [layers, 2]: addresses
    sizes: Any,  # [18]: K padded, bytes of a panel, panels of each product; see `WholePass`
    eps: Any,
    scale: Any,
    cos: Any,  # [P, rotated / 2]
    sin: Any,
    positions: Any,  # [R]
    cells: Any,  # [R]
    places: Any,  # [R, 4]: prefix, base, count, position
    ancestors: Any,  # [R]
    tiles: Any,  # [tiles, 3]
    pieces: Any,  # [pieces, 3]
    pages: Any,  # [B, P]
    narrow: Any,  # whether only `outputs` go on behind the last layer's keys and values
    out_places: Any,  # the same four for these rows alone
    out_ancestors: Any,
    out_tiles: Any,
    out_pieces: Any,
    fitted: Any,  # address of R fitted rows
    stride: Any,  # bytes of one
    wide: Any,  # address of R rows of the widest product
    seen: Any,  # address of [R, heads * D]
    parts: Any,  # [R, heads, parts, D + 2]
    done: Any,  # [layers, tiles, Hkv] of zeros
    sync: Any,  # address of `sync_bytes` of zeros
    spent: Any,  # [phases] ticks
    share: Any,
    shares: Any,
) -> None:
    rows, width = x.shape
    inner, heads, kv_heads, dim, size, num_pages = sizes[12:18]
    temp = np.empty(max(width, _SPAN) + 64, np.float32)
    keep = np.empty((0, 0), np.float32)
    piece = max(1, rows // (8 * shares))
    counter, layers = sync + 2 * LINE, taps.shape[0]
    fit, product = formats[0], formats[1]
    now = ticks()
    delta, delta_width = 0, 0
    if features.shape[0]:
        begin(
            formats, ends, start, tokens, features, x, eps, fitted, stride, wide, sync, counter,
            piece, share, shares,
        )  # fmt: skip
        counter += (HANDED_OUT - 1) * LINE
        if start[0]:
            delta, delta_width = wide, PANEL * start[5]
    else:
        _embed(formats[2], ends, tokens, x, counter, piece)
    now = _met(sync, shares, share, spent, 0, now)

    if delta or not features.shape[0]:
        counter += LINE
        first_norm = floats(table[0, 12], width if table[0, 12] else 0)
        _norm(
            fit, x, keep, temp, first_norm, eps, delta, delta_width, fitted, stride, sizes[0],
            False, counter, piece,
        )  # fmt: skip
        now = _met(sync, shares, share, spent, 1, now)
    for layer in range(layers):
        at, counter = table[layer], counter + LINE
        ends_here, asking = narrow and layer + 1 == layers, heads * dim
        first = asking // PANEL if ends_here else 0  # rows that end here ask nobody
        _matrix(product, at, sizes, 0, fitted, stride, rows, wide, counter, first, sizes[2])
        now = _met(sync, shares, share, spent, 2, now)

        k_cache = carray(_cache_at(bits, caches[layer, 0]), (num_pages, kv_heads, size * dim))
        v_cache = carray(_cache_at(bits, caches[layer, 1]), (num_pages, kv_heads, size * dim))
        qkv_width, counter = PANEL * sizes[2], counter + LINE
        _turn(
            wide + (4 * asking if ends_here else 0), qkv_width, 0 if ends_here else heads, kv_heads,
            at, sizes, cos, sin, positions, cells, eps, k_cache, v_cache, counter, piece,
        )  # fmt: skip
        now = _met(sync, shares, share, spent, 3, now)

        if ends_here:
            if share == 0:
                for i in range(outputs.shape[0]):  # ascending: none is written over before
                    x[i] = x[outputs[i]]
                    given = floats(fitted + outputs[i] * stride, stride // 4)
                    floats(fitted + i * stride, stride // 4)[:] = given
            meet(sync, shares)
            rows = outputs.shape[0]
            x, piece, counter = x[:rows], max(1, rows // (8 * shares)), counter + LINE
            first = (asking + PANEL - 1) // PANEL
            _matrix(product, at, sizes, 0, fitted, stride, rows, wide, counter, 0, first)
            now = _met(sync, shares, share, spent, 2, now)
            counter += LINE
            _turn(
                wide, qkv_width, heads, 0, at, sizes, cos, sin, positions[outputs], cells[outputs],
                eps, k_cache, v_cache, counter, piece,
            )  # fmt: skip
            now = _met(sync, shares, share, spent, 3, now)
            places, ancestors, tiles, pieces = out_places, out_ancestors, out_tiles, out_pieces
        qkv = carray(float_at(wide), (rows, qkv_width))
        q = as_strided(qkv, (rows, heads, dim), (4 * qkv_width, 4 * dim, 4))
        out = carray(float_at(seen), (rows, heads, dim))
        counter += LINE
        attend_any(
            q, out, k_cache, v_cache, places, ancestors, tiles, pieces, pages, size, at[16], scale,
            parts, done[layer], counter,
        )  # fmt: skip
        now = _met(sync, shares, share, spent, 4, now)

        for row in range(share, rows, shares):
            fit_row(
                fit, seen + 4 * row * heads * dim, 0, heads * dim, fitted + row * stride, sizes[3]
            )
        meet(sync, shares)
        counter += LINE
        _matrix(product, at, sizes, 1, fitted, stride, rows, wide, counter, 0, sizes[5])
        now = _met(sync, shares, share, spent, 5, now)

        counter += LINE
        _norm(
            fit, x, keep, temp, floats(at[13], width), eps, wide, PANEL * sizes[5], fitted, stride,
            sizes[6], False, counter, piece,
        )  # fmt: skip
        now = _met(sync, shares, share, spent, 1, now)

        counter += LINE
        _matrix(product, at, sizes, 2, fitted, stride, rows, wide, counter, 0, sizes[8])
        now = _met(sync, shares, share, spent, 6, now)

        counter += LINE
        _activate(
            fit, wide, PANEL * sizes[8], rows, inner, temp, fitted, stride, sizes[9], counter,
            piece,
        )  # fmt: skip
        now = _met(sync, shares, share, spent, 7, now)

        counter += LINE
        _matrix(product, at, sizes, 3, fitted, stride, rows, wide, counter, 0, sizes[11])
        now = _met(sync, shares, share, spent, 8, now)

        counter += LINE
        last = layer + 1 == layers
        following = floats(table[layer + 1, 12], width if table[layer + 1, 12] else 0)
        _norm(
            fit, x, hidden if last else keep, temp, following, eps, wide, PANEL * sizes[11], fitted,
            stride, sizes[0], last, counter, piece,
        )  # fmt: skip
        now = _met(sync, shares, share, spent, 1, now)
        if taps[layer] >= 0:
            first = taps[layer] * width
            for row in range(share, rows, shares):
                tapped[row, first : first + width] = x[row]
            meet(sync, shares)

    for i in range(share, outputs.shape[0], shares):
        row = hidden.ctypes.data + 4 * (i if narrow else outputs[i]) * width
        fit_row(formats[3], row, 0, width, fitted + i * stride, ends[7])
    meet(sync, shares)
    counter += LINE
    multiply(
        formats[4], fitted, stride, outputs.shape[0], ends[4], ends[7], ends[8], ends[9], ends[5],
        ends[6], logits.ctypes.data, logits.shape[1], counter,
    )  # fmt: skip
    _met(sync, shares, share, spent, 9, now)
