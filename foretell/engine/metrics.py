"""Counters of an engine since its start; none ever decreases."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = (
    "schedule",
    "propose",
    "pack",
    "forward",
    "sample",
    "commit",
    "observe",
)


@dataclass
class Metrics:
    """What happened, and where the time went."""

    num_steps: int = 0
    num_rows: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    num_finished: int = 0
    num_failed: int = 0
    drafter_errors: int = 0
    last_drafter_error: str = ""
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the time spent inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phase_seconds[name] += time.perf_counter() - start

    @staticmethod
    def now() -> float:
        """Seconds of the clock that all times are taken with."""
        return time.perf_counter()
