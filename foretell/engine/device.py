"""The runtime's stream as the engine uses it: what is under way, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from foretell.runtime.runner import Runtime
from foretell.runtime.stream import Work

T = TypeVar("T")


class Device:
    """
    Args:
        worked: told of work that was waited for.
    """

    def __init__(self, runtime: Runtime, worked: Callable[[Work[Any]], None]) -> None:
        self.runtime, self.worked, self.submit = runtime, worked, runtime.submit
        self.pending: list[Work[None]] = []
        """Work of drafters that a step has left behind; its results are not asked for."""
        self._stepping = False

    @property
    def overlaps(self) -> bool:
        """Does the host go on while the device works?"""
        return self.runtime.stream.overlaps

    def wait(self, work: Work[T]) -> T:
        """What came of submitted work."""
        result = self.runtime.wait(work)
        self.worked(work)
        return result

    def leave(self, work: Work[None]) -> None:
        """The next step may begin meanwhile; where that gains nothing the work is done now."""
        self.pending.append(work)
        if not self.overlaps:
            self.settle()

    def settle(self) -> None:
        """Returns when nothing is left from the step before."""
        while self.pending:
            self.wait(self.pending.pop(0))

    def begin(self) -> None:
        """A step begins; one that an interrupt or an error has ended may have left anything."""
        self.runtime.stream.begin()
        if self._stepping:
            self.runtime.stream.join()
            self.pending.clear()
        self._stepping = True

    def end(self) -> None:
        """A step has come to its end."""
        self._stepping = False
