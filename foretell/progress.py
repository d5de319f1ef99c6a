"""A bar for what takes over two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_EVERY = 30.0
"""Seconds between lines."""


class Advance(Protocol):
    """Tells how many more are done and, where there is something to say of them, what."""

    def __call__(self, count: float, note: str = "", /) -> None: ...


@contextmanager
def progress_bar(
    label: str, total: int, *, shown: bool = True, done: int = 0, lines: bool = False
) -> Iterator[Advance]:
    """Yields a function that advances the bar; the bar appears on stderr after two seconds.

    Args:
        done: what was done before, which says nothing about how long the rest takes.
        lines: where stderr is no terminal, a line every half minute and one in the end.
    """
    start = time.monotonic()
    if not shown or not sys.stderr.isatty():
        yield _lines(label, total, done) if shown and lines else lambda count, note="": None
        if shown and lines and (took := time.monotonic() - start) > 2:
            print(f"{label}: done in {took / 60:.1f} min", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left())
    note_column = TextColumn("{task.fields[note]}")
    bar = Progress(*columns, note_column, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total, completed=done, note="")

    def advance(count: float, note: str = "") -> None:
        if not bar.live.is_started and time.monotonic() - start > 2:
            bar.start()
        bar.update(task, advance=count, note=note)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def _lines(label: str, total: int, done: int) -> Advance:
    start = said = time.monotonic()
    now = done

    def advance(count: float, note: str = "") -> None:
        nonlocal now, said
        now += count
        moment = time.monotonic()
        if now > done and moment - said >= _EVERY:
            said = moment
            left = (moment - start) / (now - done) * (total - now)
            print(
                f"{label}: {now:,} of {total:,}, {left / 60:.1f} min left  {note}".rstrip(),
                file=sys.stderr, flush=True,
            )  # fmt: skip

    return advance
