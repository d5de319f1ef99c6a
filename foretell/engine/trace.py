"""Every step and its phases as events that Chrome's and Perfetto's viewers draw.

The file is an array of JSON objects, one a line, written step by step: whoever reads it while the
program runs, or after it was killed, finds whole lines and no closing bracket, which the viewers
do without (*Trace Event Format*, JSON array format). Nothing of it is kept in memory.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Protocol

log = logging.getLogger("foretell")


class Listener(Protocol):
    """Is told of every phase as it ends and then of the step that they made."""

    def phase(self, name: str, start: float, end: float) -> None:
        """Times in seconds of ``time.perf_counter``; ``schedule`` begins a step."""
        ...

    def work(self, name: str, start: float, end: float) -> None:
        """Device work that the engine has waited for. It may have begun in the step before."""
        ...

    def step(self, counts: Mapping[str, int]) -> None:
        """The step came to its end: its batch, rows, and tokens drafted, accepted, emitted."""
        ...


class Trace:
    """A file of events. Each engine writes to a track of its own.

    Args:
        path: the file; what is there is overwritten.

    Raises:
        ValueError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb", buffering=0)  # a line is there as soon as it is written
        except OSError as error:
            raise ValueError(f"{path}: cannot be written ({error.strerror or error})") from None
        self._lock, self._num_tracks = Lock(), 0
        self.start = time.perf_counter()
        self.whole = True
        """Whether all could be written so far."""
        self.write("[\n" + _event("process_name", "M", tid=0, args={"name": "foretell"}))

    def track(self, name: str) -> Track:
        """Two rows of the picture: the host's, with that name, and its device's."""
        tid = self._num_tracks + 1
        self._num_tracks += 2
        self.write(_event("thread_name", "M", tid=tid, args={"name": name}))
        self.write(_event("thread_name", "M", tid=tid + 1, args={"name": f"{name}: device"}))
        return Track(self, tid)

    def write(self, lines: str) -> None:
        """Writes whole lines. Where that fails there are no more events, and answers go on."""
        with self._lock:
            if not self.whole or self._file.closed:
                return
            try:
                data = lines.encode()
                while data:
                    data = data[self._file.write(data) or 0 :]
            except OSError as error:
                self.whole = False
                log.warning("the trace ends here: it cannot be written (%s)", error)

    def close(self) -> None:
        """Closes the array too."""
        self.write(_event("end", "i", tid=0, ts=self.now()).rstrip(",\n") + "\n]\n")
        self._file.close()

    def now(self) -> float:
        """Microseconds since the trace began."""
        return 1e6 * (time.perf_counter() - self.start)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


class Track:
    """One engine's steps, and beside them what its device did."""

    def __init__(self, trace: Trace, tid: int) -> None:
        self._trace, self._tid = trace, tid
        self._phases: list[tuple[str, float, float]] = []
        self._works: list[tuple[str, float, float]] = []

    def phase(self, name: str, start: float, end: float) -> None:
        """Notes a phase; those of a step that never came to its end are dropped."""
        if name == "schedule":
            self._phases.clear()
        self._phases.append((name, start, end))

    def work(self, name: str, start: float, end: float) -> None:
        """Notes device work, which goes to the device's row."""
        self._works.append((name, start, end))

    def step(self, counts: Mapping[str, int]) -> None:
        """Writes the step that ends now, with its phases inside."""
        if not self._phases:
            return
        first, origin = self._phases[0][1], self._trace.start
        spans = [("step", first, time.perf_counter()), *self._phases]
        rows = [(self._tid, span) for span in spans] + [(self._tid + 1, w) for w in self._works]
        self._trace.write(
            "".join(
                _event(
                    name,
                    "X",
                    tid=tid,
                    ts=1e6 * (start - origin),
                    dur=1e6 * (end - start),
                    args=counts,
                )
                for tid, (name, start, end) in rows
            )
        )
        self._phases.clear()
        self._works.clear()


def _event(
    name: str,
    kind: str,
    *,
    tid: int,
    ts: float = 0.0,
    dur: float | None = None,
    args: Mapping[str, int | str] | None = None,
) -> str:
    event: dict[str, object] = {"name": name, "ph": kind, "pid": os.getpid(), "tid": tid}
    event["ts"] = round(ts, 3)
    if dur is not None:
        event["dur"] = round(dur, 3)
    if args is not None:
        event["args"] = dict(args)
    return json.dumps(event) + ",\n"
