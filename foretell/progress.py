"""A bar for what takes over two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(label: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances the bar; the bar appears on stderr after two seconds."""
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
    task = bar.add_task(label, total=total)
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
