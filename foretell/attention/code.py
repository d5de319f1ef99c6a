"""Vector code for compiled kernels: a thin layer over llvmlite's builder, for numba intrinsics.

Written in LLVM's portable vector types of 16 lanes, which its back ends cut to the machine's
registers, since loops over arrays reach a quarter of the speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types

LANES = 16
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
HALVES = ir.VectorType(ir.IntType(16), LANES)
FLOATS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def floats(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def words(value: int | Sequence[int]) -> ir.Constant:
    return ir.Constant(WORDS, [value] * LANES if isinstance(value, int) else list(value))


def integer(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def unpack(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """The arguments, with a pointer to its items for an array."""
    return [
        context.make_array(kind)(context, builder, value).data
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


class Code:
    """The few operations used below, on one builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, data: Any, *offset: Any) -> Any:
        """Pointer to the sum of the offsets, in items of `data`."""
        for part in offset:
            data = self.b.gep(data, [part if isinstance(part, ir.Value) else integer(part)])
        return data

    def load(self, pointer: Any, kind: Any = FLOATS) -> Any:
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=2, typ=kind)

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def scalar(self, pointer: Any) -> Any:
        return self.b.load(pointer, align=4, typ=F32)

    def spread(self, value: Any) -> Any:
        """A scalar in all lanes."""
        kind = ir.VectorType(value.type, LANES)
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(nothing, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, nothing, words(0))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        module, name = self.b.module, "llvm.fma.v16f32"
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.b.call(function, [x, y, z])

    def loop(
        self, first: Any, end: Any, by: int, carried: list[Any], body: Callable[..., list[Any]]
    ) -> list[Any]:
        """carried = body(i, carried) for i = first, first + by, ... below end; at least once."""
        before, inside = self.b.block, self.b.append_basic_block("loop")
        after = self.b.append_basic_block("after")
        self.b.branch(inside)
        self.b.position_at_end(inside)
        index = self.b.phi(I64)
        index.add_incoming(first, before)
        values = [self.b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, before)
        results = body(index, list(values))
        following = self.b.add(index, integer(by))
        index.add_incoming(following, self.b.block)
        for phi, value in zip(values, results, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.cbranch(self.b.icmp_signed("<", following, end), inside, after)
        self.b.position_at_end(after)
        return results

    def fold(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes combined, in all lanes: halves, then quarters."""
        for step in (8, 4, 2, 1):
            turned = words([lane ^ step for lane in range(LANES)])
            vector = combine(vector, self.b.shuffle_vector(vector, vector, turned))
        return vector

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp(self, x: Any) -> Any:
        """As `kernels.exp`, for x up to 0."""
        b = self.b
        least, magic = floats(-87.0), floats(12582912.0)
        small = b.fcmp_ordered("<", x, least)
        y = b.select(small, least, x)
        z = self.fma(y, floats(1.4426950408889634), magic)
        n = b.fsub(z, magic)
        r = self.fma(n, floats(-0.693359375), y)
        r = self.fma(n, floats(2.12194440e-4), r)
        p = floats(1.9875691500e-4)
        for factor in (
            1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
        ):  # fmt: skip
            p = self.fma(p, r, floats(factor))
        p = b.fadd(self.fma(p, b.fmul(r, r), r), floats(1.0))
        power = b.add(b.shl(b.bitcast(z, WORDS), words(23)), words(127 << 23))
        p = b.fmul(p, b.bitcast(power, FLOATS))
        return b.select(small, floats(0.0), p)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@functools.cache
def has(feature: str) -> bool:
    """Whether the machine that code is made for has an instruction set."""
    if config.CPU_NAME or config.CPU_FEATURES:  # pyright: ignore[reportAttributeAccessIssue]
        return f"+{feature}" in (config.CPU_FEATURES or "")  # pyright: ignore[reportAttributeAccessIssue]
    return bool(binding.get_host_cpu_features().get(feature))


WIDE = has("avx512f")
"""Are there registers of 16 lanes, 32 of them? Else a vector takes two, of 16."""


def call(b: ir.IRBuilder, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [x.type for x in arguments])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), arguments)


def dot_halves(code: Code, total: Any, weights: Any, x: Any) -> Any:
    """total + the sum of two products of bfloat16, in each lane."""
    b = code.b
    if has("avx512bf16"):
        kind = ir.VectorType(_BFloat(), 2 * LANES)
        return call(
            b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total,
            b.bitcast(x, kind), b.bitcast(weights, kind),
        )  # fmt: skip
    for part in (lambda v: b.shl(v, words(16)), lambda v: b.and_(v, words(-65536))):
        total = code.fma(b.bitcast(part(x), FLOATS), b.bitcast(part(weights), FLOATS), total)
    return total


def to_halves(code: Code, v: Any) -> Any:
    """Sixteen float32 as bfloat16 bits, to nearest, ties to even; NaN stays NaN."""
    b = code.b
    bits = b.bitcast(v, WORDS)
    odd = b.and_(b.lshr(bits, words(16)), words(1))
    near = b.lshr(b.add(b.add(bits, words(0x7FFF)), odd), words(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", v, v), words(0x7FC0), near), HALVES)
