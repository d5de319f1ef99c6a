"""What a first start on a machine does: it says that numba compiles kernels where that takes long,
and lets one process compile what all others then find in the cache."""

from __future__ import annotations

import fcntl
import logging
import threading
from pathlib import Path
from typing import Any, TextIO

from numba.core.event import Listener, register

log = logging.getLogger("foretell")
_LONG = 2.0
"""Seconds of compiling after which a user may wonder."""
_IDLE = 5.0
"""Seconds without compiling after which the turn is given on: kernels come one after the other."""


class Notice(Listener):
    """Hears of what numba compiles; what its cache had it does not tell of.

    Args:
        directory: where the cache is, whose lock is the turn to compile; None: there is none.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._guard = threading.Lock()
        self._depth = 0
        self._said: threading.Timer | None = None
        self._turn: TextIO | None = None
        self._waited = False

    def on_start(self, event: Any) -> None:
        with self._guard:
            self._depth += 1
            first = self._depth == 1
        if first:
            self._take_turn()
        if self._said is None:
            self._said = _later(_LONG, self._say)

    def on_end(self, event: Any) -> None:
        with self._guard:
            self._depth -= 1
        if self._turn is not None and not self._depth:
            _later(_IDLE, self._give_turn)

    def _take_turn(self) -> None:
        """Waits for a process that compiles: all but the first function is then in the cache."""
        if self._turn is not None or self._directory is None:
            return
        try:
            turn = (self._directory / ".turn").open("w")
        except OSError:
            return
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not self._waited:
                log.warning("another process is compiling kernels, waiting for it")
            self._waited = True
            fcntl.flock(turn, fcntl.LOCK_EX)
        self._turn = turn

    def _give_turn(self) -> None:
        with self._guard:
            if self._turn is not None and not self._depth:
                self._turn.close()  # nobody else has the file: that ends the lock
                self._turn = None

    def _say(self) -> None:
        if self._depth:
            log.warning("compiling kernels, once on this machine: a minute or two")
        else:
            self._said = None


def _later(seconds: float, call: Any) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


def watch(directory: Path | None) -> None:
    """Once a process, before anything is compiled."""
    register("numba:compile", Notice(directory))
