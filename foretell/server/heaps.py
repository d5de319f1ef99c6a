"""Keeps the C library from holding memory that nobody uses. Libraries other than glibc have nothing
to set, and nothing to ask."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1  # malloc.h


def bound() -> None:
    """glibc gives threads heaps of their own, and each keeps what a large step once took: sharing
    them keeps the process small, and what is large comes from the system and goes back to it."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_TRIM_THRESHOLD, 2**24)
        libc.mallopt(M_MMAP_THRESHOLD, 2**22)


def trim() -> None:
    """Gives back what is free between blocks in use: with requests of all sizes that is a little
    more after each. Takes some 20 ms."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
