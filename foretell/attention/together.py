"""Threads inside compiled code: a barrier, and work handed out piece by piece.

A pass is one compiled call a thread with a few hundred barriers in it; handing out pieces as
threads become free keeps a core that another program slows from holding up the rest.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types

from foretell.attention.code import I64
from foretell.attention.jit import intrinsic, jit

LINE = 64
"""Bytes between two words that threads write: each in a cache line of its own."""
WAITED = 8
"""Where a barrier counts time that threads wait for one that has found no core."""
_SPINS = 4000
"""Looks at the barrier before the core is offered to someone else (tens of microseconds)."""
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_CLOCK = "llvm.readcyclecounter" if _X86 else "llvm.readsteadycounter"
_offer_core = types.ExternalFunction(
    "SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32()
)


def _place(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address as one operation; gives the value before."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return b.atomic_rmw("add", _place(b, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _look(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return b.load_atomic(_place(b, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _put(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        b.store_atomic(arguments[1], _place(b, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if _X86:
            kind, name = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def ticks(typing: Any) -> Any:
    """A steady clock in a unit of its own."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind, name = ir.FunctionType(I64, []), _CLOCK
        return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), [])

    return types.int64(), generate


@jit(types.int64())
def clock() -> int:
    """`ticks` for Python."""
    return ticks()


@jit()
def meet(sync: Any, threads: Any) -> None:
    """Returns once all threads have called it.

    Args:
        sync: address of two lines, zero before the first use: they count arrivals and meetings,
            and at `WAITED` the `ticks` of long waits.
    """
    if threads == 1:
        return
    meeting = _look(sync + LINE)
    if fetch_add(sync, 1) == threads - 1:
        _put(sync, 0)
        _put(sync + LINE, meeting + 1)
        return
    looks, since = 0, 0
    while _look(sync + LINE) == meeting:
        looks += 1
        if looks < _SPINS:
            _pause()
        else:
            since = since or ticks()
            _offer_core()
    if since:
        fetch_add(sync + WAITED, ticks() - since)
