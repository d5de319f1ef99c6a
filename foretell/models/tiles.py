"""Matrix products as vector code: a panel of `PANEL` outputs against 1, 2, 4 or 8 rows.

Every output of every row is summed over its inputs in order, by itself: integers within a group
of inputs, then groups one after the other in float32 (int8, int4), or inputs one (f32) or two
(bf16) at a time. So a row's bits do not depend on the rows beside it.

Layout of a panel, for steps of 4 bytes of a row: [K / step][2 tiles][16 outputs][4 bytes]. The
weights of int8 are stored plus 128, those of int4 as levels 0 to 15, since the machine multiplies
unsigned by signed bytes; a fitted row carries what that adds. A fitted row: its numbers (int8,
bfloat16 or float32) padded to whole groups of `GROUP`, then for each group a float32 scale and
either the int32 that a sum starts from (int8) or scale times sum as float32 (int4).

Numba's cache does not see this file: touch products.py after a change here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

from foretell.attention.code import (
    F32,
    FLOATS,
    I32,
    LANES,
    WORDS,
    Code,
    floats,
    integer,
    words,
)
from foretell.config import Weights
from foretell.models.quant import GROUP, PANEL

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_BYTES, _SHORTS = ir.VectorType(_I8, LANES), ir.VectorType(_I16, LANES)
_PAIRS = ir.VectorType(_I16, 2 * LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@functools.cache
def _has(feature: str) -> bool:
    """Whether the machine that code is made for has an instruction set."""
    if config.CPU_NAME or config.CPU_FEATURES:  # pyright: ignore[reportAttributeAccessIssue]
        return f"+{feature}" in (config.CPU_FEATURES or "")  # pyright: ignore[reportAttributeAccessIssue]
    return bool(binding.get_host_cpu_features().get(feature))


def _call(b: ir.IRBuilder, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [x.type for x in arguments])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), arguments)


def _dot_bytes(code: Code, total: Any, weights: Any, x: Any) -> Any:
    """total + the sum of four products of an unsigned and a signed byte, in each lane."""
    b = code.b
    if _has("avx512vnni"):
        return _call(b, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, weights, x)
    eight = ir.Constant(_PAIRS, [8] * (2 * LANES))
    low = ir.Constant(_PAIRS, [255] * (2 * LANES))
    w, x = b.bitcast(weights, _PAIRS), b.bitcast(x, _PAIRS)
    wide = ir.VectorType(I32, 2 * LANES)
    for w_part, x_part in (
        (b.and_(w, low), b.ashr(b.shl(x, eight), eight)),
        (b.lshr(w, eight), b.ashr(x, eight)),
    ):
        product = b.mul(b.sext(w_part, wide), b.sext(x_part, wide))  # LLVM makes vpmaddwd of it
        nothing = ir.Constant(wide, ir.Undefined)
        for start in (0, 1):
            lanes = words(range(start, 2 * LANES, 2))
            total = b.add(total, b.shuffle_vector(product, nothing, lanes))
    return total


def _dot_halves(code: Code, total: Any, weights: Any, x: Any) -> Any:
    """total + the sum of two products of bfloat16, in each lane."""
    b = code.b
    if _has("avx512bf16"):
        kind = ir.VectorType(_BFloat(), 2 * LANES)
        return _call(
            b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total,
            b.bitcast(x, kind), b.bitcast(weights, kind),
        )  # fmt: skip
    for part in (lambda v: b.shl(v, words(16)), lambda v: b.and_(v, words(-65536))):
        total = code.fma(b.bitcast(part(x), FLOATS), b.bitcast(part(weights), FLOATS), total)
    return total


class _Tile:
    """The code of one panel against some rows."""

    def __init__(self, code: Code, kind: Weights, rows: int, arguments: list[Any]) -> None:
        self.code, self.kind, self.rows = code, kind, rows
        b = code.b
        byte = _I8.as_pointer()
        x, stride, weights, padded, scale, bias, out, out_stride = arguments
        self.x = [b.inttoptr(b.add(x, b.mul(stride, integer(m))), byte) for m in range(rows)]
        self.weights = b.inttoptr(weights, byte)
        self.padded = padded
        self.scale, self.bias = b.inttoptr(scale, byte), b.inttoptr(bias, byte)
        row = b.mul(out_stride, integer(4))
        self.out = [b.inttoptr(b.add(out, b.mul(row, integer(m))), byte) for m in range(rows)]

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
            both = [self.vector(weights, step * 128 + 64 * t) for t in range(2)]
            for m in range(self.rows):
                item = self.spread(x[m], 4 * step)
                for t in range(2):
                    i = 2 * m + t
                    if self.kind == "f32":
                        w, v = b.bitcast(both[t], FLOATS), b.bitcast(item, FLOATS)
                        totals[i] = code.fma(v, w, totals[i])
                    else:
                        totals[i] = _dot_halves(code, totals[i], both[t], item)
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
            both = [self.vector(weights, step * 128 + 64 * t) for t in range(2)]
            for m in range(self.rows):
                item = self.spread(x[m], 4 * step)
                for t in range(2):
                    sums[2 * m + t] = _dot_bytes(code, sums[2 * m + t], both[t], item)
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
            both = [self.vector(weights, step * 64 + tile * t) for t in range(2)]
            parts = [
                [b.and_(v, low) for v in both],
                [b.and_(b.lshr(v, words(4)), low) for v in both],
            ]
            for half, part in enumerate(parts):
                for m in range(self.rows):
                    item = self.spread(x[m], 16 * half + 4 * step)
                    for t in range(2):
                        sums[2 * m + t] = _dot_bytes(code, sums[2 * m + t], part[t], item)
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


LIKE = {
    "f32": np.empty(0, np.float32),
    "bf16": np.empty(0, np.uint16),
    "int8": np.empty(0, np.int8),
    "int4": np.empty(0, np.uint8),
}
"""Compiled code learns the format from the type of an empty array, so that one function serves
all, and numba's cache knows one from the other."""
_KINDS: dict[str, Weights] = {str(array.dtype): kind for kind, array in LIKE.items()}


@intrinsic
def group_of(typing: Any, like: Any) -> Any:
    """`GROUP` of the format, a constant."""
    size = GROUP[_KINDS[str(like.dtype)]]
    return types.int64(like), lambda *_: integer(size)


def tile(rows: int) -> Any:
    """The function that multiplies `rows` fitted rows with one panel.

    Its arguments: an array of `LIKE`; then all int64: address of the first row and bytes between
    rows; address of the panel's weights; K padded; addresses of the panel's `PANEL` scales and
    biases (float32) and of its first output, and float32 items between the outputs' rows.
    """

    @intrinsic
    def function(
        typing: Any, like: Any, x: Any, stride: Any, weights: Any, padded: Any, scale: Any,
        bias: Any, out: Any, width: Any,
    ) -> Any:  # fmt: skip
        kind = _KINDS[str(like.dtype)]

        def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            _Tile(Code(b), kind, rows, list(arguments[1:])).run()
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 8), generate

    return function


def _rotated(code: Code, v: Any) -> Any:
    """Sixteen numbers times a Hadamard matrix of 16: an outlier is spread over all of them
    (QuaRot, Ashkboos et al. 2024). The weights bear the inverse."""
    for bit in (1, 2, 4, 8):
        other = code.b.shuffle_vector(v, v, words([lane ^ bit for lane in range(LANES)]))
        sign = ir.Constant(FLOATS, [-1.0 if lane & bit else 1.0 for lane in range(LANES)])
        v = code.fma(v, sign, other)
    return v


def _levels(code: Code, vectors: list[Any]) -> tuple[list[Any], Any, Any]:
    """Numbers of a group as whole ones from -127 to 127, in words; the scale and the levels' sum.
    Where one is not finite the scale is NaN, and so is all that the row is multiplied with."""
    b = code.b
    top, poison = floats(0.0), floats(0.0)
    for v in vectors:
        top = code.larger(_call(b, "llvm.fabs.v16f32", FLOATS, v), top)
        poison = code.fma(v, floats(0.0), poison)
    top = code.fold(top, code.larger)
    poison = code.fold(poison, b.fadd)
    empty = b.fcmp_ordered("==", top, floats(0.0))
    inverse = b.select(empty, floats(0.0), b.fdiv(floats(127.0), top))
    magic = floats(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number
    whole = [
        b.sub(b.bitcast(code.fma(v, inverse, magic), WORDS), b.bitcast(magic, WORDS))
        for v in vectors
    ]
    total = whole[0]
    for v in whole[1:]:
        total = b.add(total, v)
    scale = b.fadd(b.fmul(top, floats(1 / 127)), poison)
    return whole, scale, code.fold(total, b.add)


def _fit_group(
    code: Code, kind: Weights, vectors: list[Any], row: Any, k: Any, padded: Any
) -> None:
    """Writes a group that starts at input k into a fitted row."""
    b = code.b
    if kind in ("f32", "bf16"):
        width = 4 if kind == "f32" else 2
        for i, v in enumerate(vectors):
            if kind == "bf16":
                v = _halves(code, v)
            code.store(v, code.at(row, b.mul(k, integer(width)), i * LANES * width))
        return
    if kind == "int8":
        vectors = [_rotated(code, v) for v in vectors]
    whole, scale, total = _levels(code, vectors)
    for i, v in enumerate(whole):
        code.store(b.trunc(v, _BYTES), code.at(row, k, i * LANES))
    first = ir.Constant(I32, 0)
    place = code.at(row, padded, b.mul(b.udiv(k, integer(GROUP[kind])), integer(8)))
    code.store(b.extract_element(scale, first), place)
    less = b.mul(total, words(-128))
    more = less if kind == "int8" else b.fmul(scale, b.sitofp(total, FLOATS))
    code.store(b.extract_element(more, first), code.at(place, 4))


def _halves(code: Code, v: Any) -> Any:
    """Sixteen float32 as bfloat16 bits, to nearest, ties to even; NaN stays NaN."""
    b = code.b
    bits = b.bitcast(v, WORDS)
    odd = b.and_(b.lshr(bits, words(16)), words(1))
    near = b.lshr(b.add(b.add(bits, words(0x7FFF)), odd), words(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", v, v), words(0x7FC0), near), _SHORTS)


@intrinsic
def fit(typing: Any, like: Any, x: Any, row: Any, first: Any, end: Any, padded: Any) -> Any:
    """Fits inputs first .. end - 1 of a row (whole groups, first < end).

    Args:
        like: an array of `LIKE`; all others int64.
        x: address of the row's float32 inputs.
        row: address of the fitted row.
        padded: K padded.
    """
    kind = _KINDS[str(like.dtype)]

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(b)
        x, row, first, end, padded = arguments[1:]
        x, row = b.inttoptr(x, F32.as_pointer()), b.inttoptr(row, _I8.as_pointer())

        def group(k: Any, _: list[Any]) -> list[Any]:
            count = GROUP[kind] // LANES
            vectors = [code.load(code.at(x, k, i * LANES)) for i in range(count)]
            _fit_group(code, kind, vectors, row, k, padded)
            return []

        code.loop(first, end, GROUP[kind], [], group)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 5), generate
