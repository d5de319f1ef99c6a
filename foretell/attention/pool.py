"""Two or more threads for one compiled kernel that knows how to do a share of its work."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
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


class Crowd:
    """Uses fewer threads for a while after one has found no core.

    Threads that wait for each other go at the pace of the slowest, and with another program on its
    core one turn of a thread is milliseconds away: ten times a pass. One thread fewer costs little,
    as one core can read almost as fast as two.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until, self._fewer, self._rest = 0.0, 1, _LEAST_REST

    def allowed(self, shares: int) -> int:
        """How many of so many threads to use now."""
        return min(shares, self._fewer) if self._clock() < self._until else shares

    def tell(self, shares: int, waited: float) -> None:
        """Which share of a call the others spent, on average, waiting for a thread."""
        if waited > _TOO_LONG:
            self._until, self._fewer = self._clock() + self._rest, max(1, shares // 2)
            self._rest = min(2 * self._rest, _MOST_REST)
        else:
            self._rest = max(self._rest / 2, _LEAST_REST)


_LEAST_REST, _MOST_REST = 0.05, 2.0
"""Seconds with fewer threads before all are tried again; doubled each time that fails."""
_TOO_LONG = 0.2
_crowd = Crowd()


def together(
    kernel: Callable[..., None],
    arguments: tuple[Any, ...],
    shares: int,
    sync: np.ndarray,
    *kept: Any,
) -> None:
    """Calls ``kernel(*arguments, share, shares)`` for each share; the caller takes the first.

    The kernel must release the GIL, must not raise and must give the same bits for any number of
    shares. They all meet in its end: when the first one returns the others need not be asked.

    Args:
        shares: at most; fewer while the machine is busy with something else.
        sync: uint8, what they meet at.
        kept: what must outlive them: memory that `arguments` have addresses of.
    """
    shares = _crowd.allowed(shares)
    if shares <= 1:
        kernel(*arguments, 0, 1)
        return
    from foretell.attention.together import WAITED, clock  # numba is slow to import

    start = clock()
    with _one_at_a_time:
        for share in range(1, shares):
            _threads(shares - 1).submit(_share, kernel, arguments, share, shares, (sync, kept))
        kernel(*arguments, 0, shares)
    waited = int(sync[WAITED : WAITED + 8].view(np.int64)[0])
    _crowd.tell(shares, waited / (shares - 1) / max(1, clock() - start))


def _share(kernel: Any, arguments: tuple[Any, ...], share: int, shares: int, kept: Any) -> None:
    kernel(*arguments, share, shares)


def _forked() -> None:
    """A fork has none of its parent's threads, and perhaps its locks."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
