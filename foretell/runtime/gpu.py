"""What is different where the model runs on a GPU: which one it is, its stream, its memory."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from foretell.config import EngineConfig
from foretell.runtime.stream import Inline, Stream, Work, Worker

_LOOK = 2e-5
"""Seconds between looks at what a device has done."""


def device_of(config: EngineConfig, rank: int = 0) -> torch.device:
    """Where a rank computes; a GPU becomes this thread's current one.

    Args:
        rank: its number among those of this node.

    Raises:
        ValueError: there is no such GPU.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "device=cuda: torch finds no GPU here: install torch's build for CUDA and the "
            "driver, or leave device out"
        )
    if rank >= (count := torch.cuda.device_count()):
        raise ValueError(f"device=cuda: rank {rank} of this node has no GPU, there are {count}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def stream_on(device: torch.device, name: str = "pass") -> Stream:
    """What runs device work where one rank does. On a CPU that is the caller's thread: passing work
    to another takes longer than what the host could do meanwhile (docs/ranks.md)."""
    return Inline() if device.type == "cpu" else CudaStream(name, device)


class CudaStream(Worker):
    """A CUDA stream, and a thread that issues work to it: a drafter may read what it has computed
    while the host goes on. The engine's own copies go the same way (`begin`), so that all is in
    order; it waits for a piece of work, not for what was issued behind it."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        super().__init__(name)

    def begin(self) -> None:
        """See `Stream.begin`."""
        torch.cuda.set_stream(self._stream)

    def submit(self, work: Work[Any]) -> None:
        """See `Worker.submit`."""
        call, event = work.call, partial(torch.cuda.Event, enable_timing=True)
        marks = (event(), event())

        def issue() -> Any:
            self.begin()
            marks[0].record()
            try:
                return call and call()
            finally:
                marks[1].record()

        work.call, work.fence = issue, partial(_passed, work, *marks)
        super().submit(work)


def _passed(work: Work[Any], start: Any, end: Any, timeout: float | None) -> bool:
    """Whether a device has passed the mark behind a work within so many seconds. The work's times
    become the device's."""
    until = None if timeout is None else time.perf_counter() + timeout
    waited = False
    while not end.query():
        if until is not None and time.perf_counter() > until:
            return False
        time.sleep(_LOOK)
        waited = True
    seconds = start.elapsed_time(end) / 1e3
    work.end = time.perf_counter() if waited else max(work.end, work.start + seconds)
    work.start = max(work.start, work.end - seconds)
    work.fence = None  # passed once for all; and nothing holds on to itself
    return True
