"""Two or more threads for one compiled kernel that knows how to do a share of its work."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_one_at_a_time = threading.Lock()
"""Kernels whose threads wait for each other need all of them: two at once could share them out."""


_num_threads: int | None = None


def set_num_threads(count: int) -> None:
    """Threads of compiled kernels. Torch is left with one: its threads spin for a while after each
    use, and would hold the cores that the kernels' need."""
    global _num_threads
    _num_threads = count
    torch.set_num_threads(1)


def num_threads() -> int:
    """Threads of compiled kernels: as set, or as many as torch uses."""
    return _num_threads or torch.get_num_threads()


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads besides the caller's. Not numba's own pool: two OpenMP pools fight over cores."""
    return ThreadPoolExecutor(count, thread_name_prefix="foretell")


def together(
    kernel: Callable[..., None], arguments: tuple[Any, ...], shares: int, kept: Any
) -> None:
    """Calls ``kernel(*arguments, share, shares)`` for each share; the caller takes the first.

    The kernel must release the GIL, must not raise and must give the same bits for any number of
    shares. They all meet in its end: when the first one returns the others need not be asked.

    Args:
        kept: what must outlive them: memory that `arguments` have addresses of.
    """
    if shares <= 1:
        kernel(*arguments, 0, 1)
        return
    with _one_at_a_time:
        for share in range(1, shares):
            _threads(shares - 1).submit(_share, kernel, arguments, share, shares, kept)
        kernel(*arguments, 0, shares)


def _share(kernel: Any, arguments: tuple[Any, ...], share: int, shares: int, kept: Any) -> None:
    kernel(*arguments, share, shares)


def _forked() -> None:
    """A fork has none of its parent's threads, and perhaps its locks."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
