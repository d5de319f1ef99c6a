"""Device work in order on a thread of its own: what a CUDA stream is to a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Stream:
    """Runs what is submitted, one after another. Torch and the kernels release the GIL, so the
    caller's Python goes on meanwhile; an interrupt that ends the caller does not end the work."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: a pass that hangs must not keep the program from ending.
        threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Ends the thread after what was submitted."""
        self._queue.put(None)


def _run(queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := queue.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del item, future, work  # nothing is kept until the next one comes
