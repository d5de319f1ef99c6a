"""A word of weights times words of a row, in 16 lanes, as the machine at hand does it.

With AVX-512's dot products a word of four bytes or two bfloat16 is multiplied as it is. Without
them (AVX2, ARM) it is taken apart, once for all rows: bytes into two words of two numbers of 16
bits, bfloat16 into two float32. A fitted row then has its numbers that wide too, so that a product
costs a multiplication and an addition. int4's levels are so small that eight products fit in 16
bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from foretell.attention.code import (
    FLOATS,
    I32,
    LANES,
    WORDS,
    Code,
    call,
    dot_halves,
    has,
    words,
)
from foretell.config import Weights

BYTE_DOTS, HALF_DOTS = has("avx512vnni"), has("avx512bf16")
_SHORTS, _BYTES = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(8), 2 * LANES)


def width(kind: Weights) -> int:
    """Bytes of a fitted row's number."""
    if kind == "bf16":
        return 2 if HALF_DOTS else 4
    if kind == "int8":
        return 1 if BYTE_DOTS else 2
    return 4 if kind == "f32" else 1


def taken_apart(code: Code, kind: Weights, weights: Any) -> list[Any]:
    """What a word of weights (not int4) is multiplied as: each part with a word of a row."""
    b = code.b
    if kind == "int8" and not BYTE_DOTS:
        return [
            b.and_(weights, words(0x00FF00FF)),
            b.and_(b.lshr(weights, words(8)), words(0x00FF00FF)),
        ]
    if kind == "bf16" and not HALF_DOTS:
        return [b.shl(weights, words(16)), b.and_(weights, words(-65536))]
    return [weights]


def multiply_add(code: Code, kind: Weights, total: Any, part: Any, x: Any) -> Any:
    """total + part * x, where x is a word of a row in all lanes."""
    b = code.b
    if kind == "int8":
        if BYTE_DOTS:
            return call(b, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, part, x)
        return b.add(total, _pairs(code, part, x))
    if kind == "bf16" and HALF_DOTS:
        return dot_halves(code, total, part, x)
    return code.fma(b.bitcast(x, FLOATS), b.bitcast(part, FLOATS), total)


def no_levels() -> list[Any]:
    """What `add_levels` starts from."""
    if not BYTE_DOTS and has("avx2"):
        return [ir.Constant(_SHORTS, [0] * LANES)] * 2
    return [words(0)]


def add_levels(code: Code, total: list[Any], levels: Any, x: Any) -> list[Any]:
    """total + the products of four levels of int4 with four bytes of a row; at most eight of them
    can be added before `whole` makes words of the sum."""
    b = code.b
    if BYTE_DOTS:
        return [call(b, "llvm.x86.avx512.vpdpbusd.512", WORDS, total[0], levels, x)]
    if not has("avx2"):
        (sum_,) = total
        for shift in range(0, 32, 8):
            level = b.and_(b.lshr(levels, words(shift)), words(255))
            product = b.mul(level, b.ashr(b.shl(x, words(24 - shift)), words(24)))
            sum_ = b.add(sum_, product)
        return [sum_]
    product = [
        call(b, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, b.bitcast(v, _BYTES), b.bitcast(w, _BYTES))
        for v, w in zip(_halves(code, levels), _halves(code, x), strict=True)
    ]
    return [b.add(t, p) for t, p in zip(total, product, strict=True)]


def whole(code: Code, total: list[Any]) -> Any:
    """A sum of `add_levels` in words."""
    if len(total) == 1:
        return total[0]
    return _madd(code, [[half, ir.Constant(_SHORTS, [1] * LANES)] for half in total])


def _pairs(code: Code, x: Any, y: Any) -> Any:
    """The sum of two products of numbers of 16 bits, in each lane."""
    b = code.b
    if has("avx2"):
        parts = zip(_halves(code, x), _halves(code, y), strict=True)
        return _madd(code, [[b.bitcast(v, _SHORTS) for v in both] for both in parts])
    x_low, y_low = (b.ashr(b.shl(v, words(16)), words(16)) for v in (x, y))
    high = b.mul(b.ashr(x, words(16)), b.ashr(y, words(16)))
    return b.add(b.mul(x_low, y_low), high)


def _halves(code: Code, v: Any) -> list[Any]:
    """Lanes 0 to 7 and 8 to 15: a register each where registers have 256 bits."""
    lanes = ir.VectorType(I32, 8)
    return [
        code.b.shuffle_vector(v, v, ir.Constant(lanes, list(range(first, first + 8))))
        for first in (0, 8)
    ]


def _madd(code: Code, halves: list[list[Any]]) -> Any:
    """Both halves' sums of two products, in words."""
    kind = ir.VectorType(I32, 8)
    low, high = (call(code.b, "llvm.x86.avx2.pmadd.wd", kind, *both) for both in halves)
    return code.b.shuffle_vector(low, high, words(range(LANES)))
