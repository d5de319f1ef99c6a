"""A bar for what takes over two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    label: str, total: int, *, shown: bool = True, done: int = 0, lines: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances the bar; the bar appears on stderr after two seconds.

    Args:
        done: what was done before, which says nothing about how long the rest takes.
        lines: where stderr is no terminal, a line now and then, for what takes hours.
    """
    if shown and lines and not sys.stderr.isatty():
        yield _lines(label, total, done)
        return
    if not shown or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(label, total=total, completed=done)
    start = time.monotonic()

    def advance(count: int) -> None:
        if not bar.live.is_started and time.monotonic() - start > 2:
            bar.start()
        bar.advance(task, count)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


_EVERY = 30.0
"""Seconds between lines."""


def _lines(label: str, total: int, done: int) -> Callable[[int], None]:
    start = said = time.monotonic()
    now = done

    def advance(count: int) -> None:
        nonlocal now, said
        now += count
        time_now = time.monotonic()
        if time_now - said >= _EVERY and now > done:
            said = time_now
            left = (time_now - start) / (now - done) * (total - now)
            print(f"{label}: {now:,} of {total:,}, {left / 60:.1f} min left", file=sys.stderr)

    return advance
