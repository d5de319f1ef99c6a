"""Rows made fit for a product: rounded to a format's numbers, group by group, as vector code.

tiles.py has the layout.
"""

from __future__ import annotations

from typing import Any

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
    floats,
    integer,
    to_halves,
    words,
)
from foretell.attention.jit import intrinsic
from foretell.config import Weights
from foretell.models.dots import width
from foretell.models.quant import GROUP
from foretell.models.tiles import kind_of

_I8 = ir.IntType(8)
_BYTES = ir.VectorType(_I8, LANES)


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
        top = code.larger(call(b, "llvm.fabs.v16f32", FLOATS, v), top)
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


def _paired(code: Code, v: Any) -> Any:
    """Numbers 0 and 2, 1 and 3 of each four in a word of 16 bits each, as `taken_apart` has the
    weights."""
    low, high = (
        code.b.shuffle_vector(
            v,
            v,
            ir.Constant(
                ir.VectorType(I32, 8), [4 * i + j + first for i in range(4) for j in (0, 1)]
            ),
        )
        for first in (0, 2)
    )
    mask = ir.Constant(low.type, [0xFFFF] * 8)
    return code.b.or_(code.b.and_(low, mask), code.b.shl(high, ir.Constant(low.type, [16] * 8)))


def _fit_group(
    code: Code, kind: Weights, vectors: list[Any], row: Any, k: Any, padded: Any
) -> None:
    """Writes a group that starts at input k into a fitted row."""
    b, size = code.b, width(kind)
    if kind in ("f32", "bf16"):
        for i, v in enumerate(vectors):
            if kind == "bf16":
                v = to_halves(code, v)
                v = b.shl(b.zext(v, WORDS), words(16)) if size == 4 else v
            code.store(v, code.at(row, b.mul(k, integer(size)), i * LANES * size))
        return
    if kind == "int8":
        vectors = [_rotated(code, v) for v in vectors]
    whole, scale, total = _levels(code, vectors)
    for i, v in enumerate(whole):
        v = _paired(code, v) if size == 2 else b.trunc(v, _BYTES)
        code.store(v, code.at(row, b.mul(k, integer(size)), i * LANES * size))
    first = ir.Constant(I32, 0)
    extras = code.at(row, b.mul(padded, integer(size)))
    place = code.at(extras, b.mul(b.udiv(k, integer(GROUP[kind])), integer(8)))
    code.store(b.extract_element(scale, first), place)
    less = b.mul(total, words(-128))
    more = less if kind == "int8" else b.fmul(scale, b.sitofp(total, FLOATS))
    code.store(b.extract_element(more, first), code.at(place, 4))


@intrinsic
def fit(typing: Any, like: Any, x: Any, row: Any, first: Any, end: Any, padded: Any) -> Any:
    """Fits inputs first .. end - 1 of a row (whole groups, first < end).

    Args:
        like: an array of `LIKE`; all others int64.
        x: address of the row's float32 inputs.
        row: address of the fitted row.
        padded: K padded.
    """
    kind = kind_of(like)

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
