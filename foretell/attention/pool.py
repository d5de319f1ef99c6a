"""Two or more threads for one compiled kernel that knows how to do a share of its work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads besides the caller's. Not numba's own pool: two OpenMP pools fight over cores."""
    return ThreadPoolExecutor(count, thread_name_prefix="foretell")


def in_shares(kernel: Callable[..., None], arguments: tuple[Any, ...], shares: int) -> None:
    """Calls ``kernel(*arguments, share, shares)`` for each share; the caller takes the first.

    The kernel must release the GIL and must give the same bits for any number of shares.
    """
    if shares <= 1:
        kernel(*arguments, 0, 1)
        return
    submit = _threads(shares - 1).submit
    others = [submit(kernel, *arguments, share, shares) for share in range(1, shares)]
    kernel(*arguments, 0, shares)
    for other in others:
        other.result()
