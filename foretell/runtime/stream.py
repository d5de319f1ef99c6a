"""Device work in order, on the caller's thread or beside it: what a CUDA stream is to a GPU.

Work is submitted, the host does something else, and then waits. Which of the two streams is used
changes when things happen, never what comes out.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
_GRACE = 5.0
"""Seconds that work under way gets when nobody needs its thread any more."""


class Work(Generic[T]):
    """A piece of device work, under way or over.

    Args:
        name: for traces.
        call: what to do.
    """

    __slots__ = (
        "_value",
        "begun",
        "call",
        "end",
        "error",
        "fence",
        "is_over",
        "name",
        "over",
        "start",
    )

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self.name = name
        self.start = self.end = 0.0
        """Seconds of ``time.perf_counter``."""
        self.is_over = False
        self.error: BaseException | None = None
        self.begun: threading.Event | None = None
        self.over: threading.Event | None = None
        """Of work on another thread."""
        self.fence: Callable[[float | None], bool] | None = None
        """Of work that was only issued by the time it is over: `wait` for the device itself."""
        self.call: Callable[[], T] | None = call
        self._value: T | None = None

    def run(self) -> None:
        """Does it; what it raises is kept for `value`."""
        assert self.call is not None
        self.start = time.perf_counter()
        if self.begun:
            self.begun.set()
        try:
            self._value = self.call()
        except BaseException as error:
            self.error = error
        self.call = None
        self.end = time.perf_counter()
        self.is_over = True
        if self.over:
            self.over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether work on another thread is done within ``timeout`` seconds."""
        assert self.over is not None
        return self.over.wait(timeout) and (self.fence is None or self.fence(timeout))

    def value(self) -> T:
        """What came of it, once it is over."""
        assert self.is_over
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


class Stream(Protocol):
    overlaps: bool
    """Does the host go on meanwhile?"""

    @property
    def here(self) -> bool:
        """Is the caller on a thread of the stream's own? There nothing may wait for a host that may
        wait for the stream."""
        ...

    def begin(self) -> None:
        """From now on what the calling thread does itself comes in order with submitted work."""
        ...

    def submit(self, work: Work[Any]) -> None:
        """Queues work behind what was submitted before."""
        ...

    def wait(self, work: Work[T]) -> T:
        """The result of submitted work; what it raised is raised here."""
        ...

    def join(self, timeout: float | None = None) -> bool:
        """Whether nothing is under way any more within ``timeout`` seconds; work that nobody waited
        for may be dropped."""
        ...

    def close(self) -> None:
        """Takes no more work."""
        ...


class Inline:
    """On the caller's own thread, when its result is asked for."""

    overlaps = False
    here = False

    def __init__(self) -> None:
        self._queue: deque[Work[Any]] = deque()

    def begin(self) -> None: ...

    def submit(self, work: Work[Any]) -> None:
        self._queue.append(work)

    def wait(self, work: Work[T]) -> T:
        while not work.is_over:
            self._queue.popleft().run()
        return work.value()

    def join(self, timeout: float | None = None) -> bool:
        self._queue.clear()
        return True

    def close(self) -> None:
        self._queue.clear()


class Worker:
    """On a thread of its own: torch and the kernels release the GIL, so the caller's Python goes on
    meanwhile; an interrupt that ends the caller does not end the work."""

    overlaps = True

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Work[Any] | None] = SimpleQueue()
        self._last: Work[Any] | None = None
        # A daemon: a pass that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        # Python would end it in the middle of torch when the program ends, which aborts.
        weakref.finalize(self, _stop, self._queue, self._thread)

    @property
    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def begin(self) -> None: ...

    def submit(self, work: Work[Any]) -> None:
        """Where the thread was idle this returns once it has taken up the work: the caller, going
        on in Python, would keep the GIL from it for as long."""
        idle = self._last is None or self._last.is_over
        begun = work.begun = threading.Event()
        work.over = threading.Event()
        self._last = work
        self._queue.put(work)
        if idle:
            begun.wait()

    def wait(self, work: Work[T]) -> T:
        work.wait()
        return work.value()

    def join(self, timeout: float | None = None) -> bool:
        return self._last is None or self._last.wait(timeout)

    def close(self) -> None:
        self._queue.put(None)


def _stop(queue: SimpleQueue[Work[Any] | None], thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(_GRACE)


@torch.inference_mode()
def _run(queue: SimpleQueue[Work[Any] | None]) -> None:
    while (work := queue.get()) is not None:
        work.run()
        del work  # nothing is kept until the next one comes
