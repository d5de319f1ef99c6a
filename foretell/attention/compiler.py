"""Whether numba can be had; without it everything runs in plain torch, slowly and as exactly."""

from __future__ import annotations

import logging
from functools import cache

log = logging.getLogger("foretell")


@cache
def have_compiler() -> bool:
    """Tried once a process; says so in the log where it fails."""
    try:
        import llvmlite  # noqa: F401
        import numba  # noqa: F401
    except ImportError as error:
        log.warning("numba cannot be had (%s): running in plain torch, many times slower", error)
        return False
    return True
