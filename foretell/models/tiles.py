"""Matrix products as vector code: a panel of `PANEL` outputs against 1, 2, 4 or 8 rows.

Every output of every row is summed over its inputs in order, by itself: integers within a group
of inputs, then groups one after the other in float32 (int8, int4), or inputs one (f32) or two
(bf16) at a time. So a row's bits do not depend on the rows beside it.

Layout of a panel, for steps of 4 bytes of a row: [K / step][2 tiles][16 outputs][4 bytes]. The
weights of int8 are stored plus 128, those of int4 as levels 0 to 15, since the machine multiplies
unsigned by signed bytes; a fitted row carries what that adds. A fitted row: its numbers (int8,
bfloat16 or float32) padded to whole groups of `GROUP`, then for each group a float32 scale and
either the int32 that a sum starts from (int8) or scale times sum as float32 (int4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from foretell.attention.code import (
    F32,
    FLOATS,
    I32,
    LANES,
    WORDS,
    Code,
    call,
    dot_bytes,
    dot_halves,
    floats,
    integer,
    words,
)
from foretell.attention.jit import intrinsic
from foretell.config import Weights
from foretell.models.quant import GROUP, PANEL

_I8 = ir.IntType(8)
_HINT = [ir.Constant(I32, x) for x in (0, 2, 1)]
"""Of a fetch: to read, into the second cache, data."""


class _Tile:
    """The code of one panel against some rows."""

    def __init__(
        self, code: Code, kind: Weights, rows: int, lines: int, arguments: list[Any]
    ) -> None:
        self.code, self.rows, self.lines = code, rows, lines
        self.kind: Weights = kind
        b = code.b
        byte = _I8.as_pointer()
        x, stride, weights, padded, scale, bias, out, out_stride, ahead = arguments
        self.ahead = b.inttoptr(ahead, byte)
        self.x = [b.inttoptr(b.add(x, b.mul(stride, integer(m))), byte) for m in range(rows)]
        self.weights = b.inttoptr(weights, byte)
        self.padded = padded
        self.scale, self.bias = b.inttoptr(scale, byte), b.inttoptr(bias, byte)
        row = b.mul(out_stride, integer(4))
        self.out = [b.inttoptr(b.add(out, b.mul(row, integer(m))), byte) for m in range(rows)]

    def ask(self, k: Any, group: int, step: int, steps: int) -> None:
        """Has a step's share of the `lines` that go with each 128 bytes of weights fetched."""
        if self.lines:
            size = group // steps * self.lines // 2
            groups = self.code.b.udiv(k, integer(GROUP[self.kind]))
            at = self.code.b.mul(groups, integer(group * self.lines // 2))
            for line in range(step * size, (step + 1) * size, 64):
                place = self.code.at(self.ahead, at, line)
                call(self.code.b, "llvm.prefetch.p0", ir.VoidType(), place, *_HINT)

    def vector(self, pointer: Any, offset: int = 0, kind: Any = WORDS) -> Any:
        return self.code.load(self.code.at(pointer, offset), kind)

    def spread(self, pointer: Any, offset: Any = 0, kind: Any = I32) -> Any:
        place = self.code.b.bitcast(self.code.at(pointer, offset), kind.as_pointer())
        return self.code.spread(self.code.b.load(place, align=4, typ=kind))

    def finish(self, totals: list[Any]) -> None:
        """Writes totals * scale + bias."""
        for t in range(2):
            scale = self.vector(self.scale, 64 * t, FLOATS)
            bias = self.vector(self.bias, 64 * t, FLOATS)
            for m in range(self.rows):
                value = self.code.fma(totals[2 * m + t], scale, bias)
                self.code.store(value, self.code.at(self.out[m], 64 * t))

    def run(self) -> None:
        zero = [floats(0.0)] * (2 * self.rows)
        size = GROUP[self.kind]
        body = {"int8": self._int8, "int4": self._int4}.get(self.kind, self._plain)
        self.finish(self.code.loop(integer(0), self.padded, size, zero, body))

    def _plain(self, k: Any, totals: list[Any]) -> list[Any]:
        b, code = self.code.b, self.code
        width = 4 if self.kind == "f32" else 2
        weights = code.at(self.weights, b.mul(k, integer(PANEL * width)))
        x = [code.at(row, b.mul(k, integer(width))) for row in self.x]
        for step in range(GROUP[self.kind] * width // 4):
            self.ask(k, PANEL * GROUP[self.kind] * width, step, GROUP[self.kind] * width // 4)
            both = [self.vector(weights, step * 128 + 64 * t) for t in range(2)]
            for m in range(self.rows):
                item = self.spread(x[m], 4 * step)
                for t in range(2):
                    i = 2 * m + t
                    if self.kind == "f32":
                        w, v = b.bitcast(both[t], FLOATS), b.bitcast(item, FLOATS)
                        totals[i] = code.fma(v, w, totals[i])
                    else:
                        totals[i] = dot_halves(code, totals[i], both[t], item)
        return totals

    def _extra(self, m: int, k: Any, field: int, kind: Any) -> Any:
        """A group's scale (field 0) or what goes with it (1), in all lanes."""
        b, size = self.code.b, integer(GROUP[self.kind])
        start = b.add(self.padded, b.mul(b.udiv(k, size), integer(8)))
        return self.spread(self.x[m], b.add(start, integer(4 * field)), kind)

    def _int8(self, k: Any, totals: list[Any]) -> list[Any]:
        b, code = self.code.b, self.code
        weights = code.at(self.weights, b.mul(k, integer(PANEL)))
        x = [code.at(row, k) for row in self.x]
        sums: list[Any] = []
        for m in range(self.rows):
            sums += [self._extra(m, k, 1, I32)] * 2
        for step in range(GROUP["int8"] // 4):
            self.ask(k, PANEL * GROUP["int8"], step, GROUP["int8"] // 4)
            both = [self.vector(weights, step * 128 + 64 * t) for t in range(2)]
            for m in range(self.rows):
                item = self.spread(x[m], 4 * step)
                for t in range(2):
                    sums[2 * m + t] = dot_bytes(code, sums[2 * m + t], both[t], item)
        for m in range(self.rows):
            scale = self._extra(m, k, 0, F32)
            for i in (2 * m, 2 * m + 1):
                totals[i] = code.fma(b.sitofp(sums[i], FLOATS), scale, totals[i])
        return totals

    def _int4(self, k: Any, totals: list[Any]) -> list[Any]:
        """A group of a tile: levels [4][16][4 pairs] bytes, scales [16] and minima [16] float16."""
        b, code = self.code.b, self.code
        tile = GROUP["int4"] // 2 * LANES + 4 * LANES
        weights = code.at(self.weights, b.mul(b.udiv(k, integer(GROUP["int4"])), integer(2 * tile)))
        x = [code.at(row, k) for row in self.x]
        low = words(0x0F0F0F0F)
        sums = [words(0)] * (2 * self.rows)
        for step in range(4):
            self.ask(k, 2 * tile, step, 4)
            both = [self.vector(weights, step * 64 + tile * t) for t in range(2)]
            parts = [
                [b.and_(v, low) for v in both],
                [b.and_(b.lshr(v, words(4)), low) for v in both],
            ]
            for half, part in enumerate(parts):
                for m in range(self.rows):
                    item = self.spread(x[m], 16 * half + 4 * step)
                    for t in range(2):
                        sums[2 * m + t] = dot_bytes(code, sums[2 * m + t], part[t], item)
        halves = ir.VectorType(ir.HalfType(), LANES)
        scale, least = (
            [b.fpext(self.vector(weights, 256 + at + tile * t, halves), FLOATS) for t in range(2)]
            for at in (0, 32)
        )
        for m in range(self.rows):
            whole, share = self._extra(m, k, 0, F32), self._extra(m, k, 1, F32)
            for t in range(2):
                i = 2 * m + t
                totals[i] = code.fma(least[t], share, totals[i])
                product = b.fmul(b.sitofp(sums[i], FLOATS), scale[t])
                totals[i] = code.fma(product, whole, totals[i])
        return totals


LIKE: dict[Weights, np.ndarray] = {
    "f32": np.empty(0, np.float32),
    "bf16": np.empty(0, np.uint16),
    "int8": np.empty(0, np.int8),
    "int4": np.empty(0, np.uint8),
}
"""Compiled code learns the format from the type of an empty array, so that one function serves
all, and numba's cache knows one from the other."""
_KINDS: dict[str, Weights] = {str(array.dtype): kind for kind, array in LIKE.items()}


def kind_of(like: Any) -> Weights:
    """The format that an array type stands for."""
    return _KINDS[str(like.dtype)]


@intrinsic
def group_of(typing: Any, like: Any) -> Any:
    """`GROUP` of the format, a constant."""
    size = GROUP[kind_of(like)]
    return types.int64(like), lambda *_: integer(size)


def tile(rows: int, lines: int) -> Any:
    """The function that multiplies `rows` fitted rows with one panel, and has `lines` cache lines
    fetched for every 128 bytes of weights: with many rows a core computes for longer than it looks
    ahead.

    Its arguments: an array of `LIKE`; then all int64: address of the first row and bytes between
    rows; address of the panel's weights; K padded; addresses of the panel's `PANEL` scales and
    biases (float32) and of its first output, and float32 items between the outputs' rows;
    address from which to fetch.
    """

    @intrinsic
    def function(
        typing: Any, like: Any, x: Any, stride: Any, weights: Any, padded: Any, scale: Any,
        bias: Any, out: Any, width: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        kind = kind_of(like)

        def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            _Tile(Code(b), kind, rows, lines, list(arguments[1:])).run()
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 9), generate

    return function
