"""Asking for memory before it is read."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from foretell.attention.jit import intrinsic

_LINE = 64
"""Bytes of a cache line."""


def _fetch(typing: Any, array: Any, first: Any, num: Any) -> Any:
    """Asks for `num` >= 1 items of a C array from flat place `first` on, and does not wait."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind, (array, first, num) = signature.args[0], arguments
        word, half, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        name = "llvm.prefetch.p0"
        shape = ir.FunctionType(ir.VoidType(), [byte, half, half, half])
        prefetch = b.module.globals.get(name) or ir.Function(b.module, shape, name)
        hint = [ir.Constant(half, x) for x in (0, 3, 1)]  # to read, into the first cache, data
        data = b.bitcast(context.make_array(kind)(context, b, array).data, byte)
        size = ir.Constant(word, kind.dtype.bitwidth // 8)
        begin = b.mul(first, size)
        end = b.add(begin, b.mul(num, size))
        before, inside = b.block, b.append_basic_block("line")
        after = b.append_basic_block("fetched")
        b.branch(inside)
        b.position_at_end(inside)
        place = b.phi(word)
        place.add_incoming(begin, before)
        b.call(prefetch, [b.gep(data, [place]), *hint])
        following = b.add(place, ir.Constant(word, _LINE))
        place.add_incoming(following, inside)
        b.cbranch(b.icmp_signed("<", following, end), inside, after)
        b.position_at_end(after)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


fetch: Any = intrinsic(_fetch)
