"""Counters of an engine since its start; none ever decreases."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from foretell.engine.trace import Listener
from foretell.runtime.stream import Work
from foretell.sequence import Sequence

log = logging.getLogger("foretell")
PHASES = (
    "schedule",
    "propose",
    "pack",
    "ahead",
    "forward",
    "sample",
    "commit",
    "observe",
)


class Timer:
    """A context manager that adds its seconds to ``seconds[name]``. Eight of them are entered in
    each step, so they are made once."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name, self._start = seconds, name, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start


class TracedTimer(Timer):
    """A timer that tells a listener too."""

    __slots__ = ("_listener",)

    def __init__(self, seconds: dict[str, float], name: str, listener: Listener) -> None:
        super().__init__(seconds, name)
        self._listener = listener

    def __exit__(self, *error: object) -> None:
        end = time.perf_counter()
        self._seconds[self._name] += end - self._start
        self._listener.phase(self._name, self._start, end)


@dataclass
class Drafts:
    """What one of the schemes guessed, and what became of it."""

    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list[int])
    accepted_by_position: list[int] = field(default_factory=list[int])


@dataclass
class Metrics:
    """What happened, and where the time went."""

    num_steps: int = 0
    num_rows: int = 0
    num_passes: int = 0
    """As in `Stats`: a pass counts once for each sequence in it."""
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    num_finished: int = 0
    num_failed: int = 0
    drafter_errors: int = 0
    last_drafter_error: str = ""
    drafted_by_position: list[int] = field(default_factory=list[int])
    """As in `Stats`, over all requests."""
    by_scheme: dict[int, Drafts] = field(default_factory=dict[int, Drafts])
    """The same of each of the engine's schemes, by its number; forced tokens are the scheme's whose
    drafts they took the place of."""
    accepted_by_position: list[int] = field(default_factory=list[int])
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _timers: dict[str, Timer] = field(default_factory=dict[str, Timer], repr=False, compare=False)
    _listener: Listener | None = field(default=None, repr=False, compare=False)
    _before: dict[str, int] = field(default_factory=dict[str, int], repr=False, compare=False)
    """Totals at the end of the step before, while somebody listens."""

    def phase(self, name: str) -> Timer:
        """Adds the time spent inside to a phase; not to be nested in itself."""
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = Timer(self.phase_seconds, name)
        return timer

    def step(self, batch: int, rows: int) -> None:
        """Counts a step that came to its end."""
        self.num_steps += 1
        self.num_rows += rows
        if self._listener is not None:
            totals = self._totals()
            new = {name: total - self._before[name] for name, total in totals.items()}
            self._before = totals
            self._listener.step({"batch": batch, "rows": rows, **new})

    def worked(self, work: Work[Any]) -> None:
        """Counts device work that is over."""
        if self._listener is not None:
            self._listener.work(work.name, work.start, work.end)

    def drafter_failed(self, where: str, error: Exception) -> None:
        """Counts a drafter's mistake; the first one is logged."""
        self.drafter_errors += 1
        self.last_drafter_error = f"{where}: {type(error).__name__}: {error}"
        if self.drafter_errors == 1:
            log.warning("the drafter failed, its drafts are dropped (%s)", error, exc_info=True)

    def trace_to(self, listener: Listener) -> None:
        """From now on every step and its phases are told to that listener."""
        self._listener, self._before = listener, self._totals()
        self._timers = {name: TracedTimer(self.phase_seconds, name, listener) for name in PHASES}

    def _totals(self) -> dict[str, int]:
        return {"drafted": self.drafted, "accepted": self.accepted, "emitted": self.emitted}

    def count(
        self, sequence: Sequence, depth: list[int], accepted: int, emitted: int, scheme: int = 0
    ) -> None:
        """Takes in one verified tree. What lies behind an end never existed, drafts included: so
        they are not counted, and a target that drafts for itself reads exactly 1.

        Args:
            depth: of each of the tree's nodes, root first.
            accepted: draft tokens that became part of the answer.
            emitted: tokens that the answer grew by.
            scheme: whose tree it was.
        """
        stats, now = sequence.stats, self.now()
        checked = [d for d in depth[1:] if d <= emitted or not sequence.finished]
        reached = max(checked, default=0)
        stats.drafted += len(checked)
        stats.accepted += accepted
        own = self.by_scheme.setdefault(scheme, Drafts())
        own.drafted += len(checked)
        own.accepted += accepted
        for counts, number in (
            (stats.drafted_by_position, reached),
            (stats.accepted_by_position, accepted),
            (self.drafted_by_position, reached),
            (self.accepted_by_position, accepted),
            (own.drafted_by_position, reached),
            (own.accepted_by_position, accepted),
        ):
            counts.extend([0] * (reached - len(counts)))
            for position in range(number):
                counts[position] += 1
        stats.num_passes += 1
        stats.num_tokens += emitted
        if emitted:
            stats.first_token = stats.first_token or now
            stats.last_token = now
        stats.token_times.extend([now] * emitted)
        self.num_passes += 1
        self.drafted += len(checked)
        self.accepted += accepted
        self.emitted += emitted

    @staticmethod
    def now() -> float:
        """Seconds of the clock that all times are taken with."""
        return time.perf_counter()
