"""Says that numba compiles kernels where it takes long: the first start on a machine."""

from __future__ import annotations

import logging
import threading
from typing import Any

from numba.core.event import Listener, register

log = logging.getLogger("foretell")
_LONG = 2.0
"""Seconds of compiling after which a user may wonder."""


class Notice(Listener):
    """One line on the log. Numba tells of what it compiles, not of what its cache had."""

    def __init__(self) -> None:
        self._depth = 0
        self._timer: threading.Timer | None = None

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._timer is None:
            self._timer = threading.Timer(_LONG, self._say)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: Any) -> None:
        self._depth -= 1

    def _say(self) -> None:
        if self._depth:
            log.warning("compiling kernels, once on this machine")
        else:
            self._timer = None


def watch() -> None:
    """Once a process, before anything is compiled."""
    register("numba:compile", Notice())
