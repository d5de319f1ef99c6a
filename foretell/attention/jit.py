"""numba's compiler, with a cache that knows everything our kernels are made of.

Numba looks at the file that a function is in. Ours are put together from several (vector code,
constants, other kernels), and a stale one computes nonsense: so the cache's directory is named
after a digest of them all. It lies in the user's cache directory; where nothing can be written
each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba.extending
from numba import config

from foretell.attention.compiling import watch
from foretell.config import home

intrinsic: Any = numba.extending.intrinsic
carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
"""Numba's own, whose types do not tell what compiled code passes."""
_PACKAGE = Path(__file__).parents[1]


def _digest() -> str:
    sources = [p for part in ("attention", "models") for p in (_PACKAGE / part).glob("*.py")]
    seen = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in [*sorted(sources), *sorted((_PACKAGE / "runtime").glob("*_cpu.py"))]:
        seen.update(path.name.encode() + path.read_bytes())
    return seen.hexdigest()[:16]


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


_root = os.environ.get("NUMBA_CACHE_DIR") or home() / "kernels"
_directory = Path(_root) / _digest()
_cached = _writable(_directory)
watch(_directory if _cached else None)


@contextlib.contextmanager
def _our_cache() -> Generator[None]:
    """Numba asks where its cache is when a function is defined."""
    before = config.CACHE_DIR  # pyright: ignore[reportAttributeAccessIssue]
    config.CACHE_DIR = str(_directory)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        config.CACHE_DIR = before  # pyright: ignore[reportAttributeAccessIssue]


def jit(*signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` that releases the GIL and divides as numpy does."""

    def compile_(function: Callable[..., Any]) -> Any:
        with _our_cache():
            options_ = {"nogil": True, "error_model": "numpy", "cache": _cached} | options
            return numba.njit(*signature, **options_)(function)

    return compile_


def callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.cfunc`: a compiled function with an address."""

    def compile_(function: Callable[..., Any]) -> Any:
        with _our_cache():
            return numba.cfunc(signature, error_model="numpy", cache=_cached)(function)

    return compile_
