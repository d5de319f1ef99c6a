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
    WIDE,
    WORDS,
    Code,
    call,
    floats,
    integer,
    words,
)
from foretell.attention.jit import intrinsic
from foretell.config import Weights
from foretell.models.dots import (
    add_levels,
    multiply_add,
    no_levels,
    taken_apart,
    whole,
    width,
)
from foretell.models.quant import GROUP, PANEL

_I8 = ir.IntType(8)
SIZES = (1, 2, 4, 8) if WIDE else (1, 2, 3, 4)
"""Rows of the tiles that there are."""
UNROLLED: dict[Weights, int] = (
    {"f32": 64, "bf16": 32, "int8": 16, "int4": 4}
    if WIDE
    else {"f32": 2, "bf16": 2, "int8": 2, "int4": 2}
)
"""Steps that are one piece of code: of a group, where registers are many."""
_HINT = [ir.Constant(I32, x) for x in (0, 2, 1)]
"""Of a fetch: to read, into the second cache, data."""


class _Tile:
    """The code of one panel against some rows."""

    def __init__(
        self, code: Code, kind: Weights, rows: int, lines: int, arguments: list[Any]
    ) -> None:
        self.code, self.rows, self.lines = code, rows, lines
        self.tiles = [0, 1]
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

    def ask(self, at: Any, more: int) -> None:
        """Has the lines fetched that go with the 128 bytes of weights at offset at + more."""
        b, turns = self.code.b, 3 - len(self.tiles)
        for line in range(self.lines // turns):
            place = b.lshr(b.mul(at, integer(self.lines)), integer(1))
            fixed = more * self.lines // 2 + 64 * (self.tiles[0] + line)
            place = self.code.at(self.ahead, place, fixed)
            call(b, "llvm.prefetch.p0", ir.VoidType(), place, *_HINT)

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
        self.finish(self.code.loop(integer(0), self.padded, size, zero, self._group))

    def _group(self, k: Any, totals: list[Any]) -> list[Any]:
        """Both tiles at once, or one after the other where the sums would not fit in registers."""
        body = {"int8": self._int8, "int4": self._int4}.get(self.kind, self._products)
        for tiles in [[0, 1]] if WIDE or self.rows <= 2 else [[0], [1]]:
            self.tiles = tiles
            own = [2 * m + t for m in range(self.rows) for t in tiles]
            for i, total in zip(own, body(k, [totals[i] for i in own]), strict=True):
                totals[i] = total
        return totals

    def _products(self, k: Any, totals: list[Any]) -> list[Any]:
        """Adds a group's products (not int4)."""
        b, code, tiles, unrolled = self.code.b, self.code, len(self.tiles), UNROLLED[self.kind]
        held = {"f32": 4, "bf16": 2, "int8": 1}[self.kind]  # bytes of a weight
        wider = width(self.kind) // held

        def some(step: Any, sums: list[Any]) -> list[Any]:
            at = b.add(b.mul(k, integer(held)), b.mul(step, integer(4)))  # bytes of an output
            here = b.mul(at, integer(PANEL))
            for more in range(0, 4 * unrolled, 4):
                self.ask(here, more * PANEL)
                place = code.at(self.weights, here, more * PANEL)
                parts = [
                    taken_apart(code, self.kind, self.vector(place, 64 * t)) for t in self.tiles
                ]
                # Row by row: the other way round takes more registers than narrow machines have.
                for m, row in enumerate(self.x):
                    for i, part in enumerate(zip(*parts, strict=True)):
                        x = self.spread(
                            code.at(row, b.mul(at, integer(wider))), 4 * i + more * wider
                        )
                        for n, weights in enumerate(part, m * tiles):
                            sums[n] = multiply_add(code, self.kind, sums[n], weights, x)
            return sums

        steps = GROUP[self.kind] * held // 4
        return code.loop(integer(0), integer(steps), unrolled, totals, some)

    def _extra(self, m: int, k: Any, field: int, kind: Any) -> Any:
        """A group's scale (field 0) or what goes with it (1), in all lanes."""
        b, size = self.code.b, integer(GROUP[self.kind])
        extras = b.mul(self.padded, integer(width(self.kind)))
        start = b.add(extras, b.mul(b.udiv(k, size), integer(8)))
        return self.spread(self.x[m], b.add(start, integer(4 * field)), kind)

    def _int8(self, k: Any, totals: list[Any]) -> list[Any]:
        b, code, tiles = self.code.b, self.code, len(self.tiles)
        start = [x for m in range(self.rows) for x in [self._extra(m, k, 1, I32)] * tiles]
        sums = self._products(k, start)
        for m in range(self.rows):
            scale = self._extra(m, k, 0, F32)
            for i in range(m * tiles, (m + 1) * tiles):
                totals[i] = code.fma(b.sitofp(sums[i], FLOATS), scale, totals[i])
        return totals

    def _int4(self, k: Any, totals: list[Any]) -> list[Any]:
        """A group of a tile: levels [4][16][4 pairs] bytes, scales [16] and minima [16] float16."""
        b, code, tiles, unrolled = self.code.b, self.code, self.tiles, UNROLLED["int4"]
        tile = GROUP["int4"] // 2 * LANES + 4 * LANES
        start = b.mul(b.udiv(k, integer(GROUP["int4"])), integer(2 * tile))
        weights, low = code.at(self.weights, start), words(0x0F0F0F0F)

        def some(step: Any, sums: list[Any]) -> list[Any]:
            for more in range(unrolled):
                at = b.mul(b.add(step, integer(more)), integer(4))  # inputs, and bytes of an output
                self.ask(b.add(start, b.mul(at, integer(PANEL))), 0)
                place = code.at(weights, b.mul(at, integer(LANES)))
                both = [self.vector(place, tile * t) for t in tiles]
                for half in range(2):
                    parts = [b.and_(b.lshr(v, words(4 * half)), low) for v in both]
                    for m, row in enumerate(self.x):
                        x = self.spread(code.at(row, k, at), 16 * half)
                        for n, levels in enumerate(parts, m * len(tiles)):
                            sums[n::stride] = add_levels(code, sums[n::stride], levels, x)
            return sums

        stride = len(tiles) * self.rows
        nothing = [zero for zero in no_levels() for _ in range(stride)]
        sums = code.loop(integer(0), integer(4), unrolled, nothing, some)
        self.ask(start, 16 * PANEL)
        halves = ir.VectorType(ir.HalfType(), LANES)
        scale, least = (
            [b.fpext(self.vector(weights, 256 + at + tile * t, halves), FLOATS) for t in tiles]
            for at in (0, 32)
        )
        for m in range(self.rows):
            one, share = self._extra(m, k, 0, F32), self._extra(m, k, 1, F32)
            for t in range(len(tiles)):
                i = m * len(tiles) + t
                totals[i] = code.fma(least[t], share, totals[i])
                product = b.fmul(b.sitofp(whole(code, sums[i::stride]), FLOATS), scale[t])
                totals[i] = code.fma(product, one, totals[i])
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
