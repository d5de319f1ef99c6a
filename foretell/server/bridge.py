"""Between the event loop and the engine: one thread steps, the loop never waits for a pass.

Sequences go in and aborts go in through the engine's own inbox; what a step added comes out as one
call on the loop for all requests together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator

import torch

from foretell.answer import Delta, Follower, Result
from foretell.llm import LLM
from foretell.runtime.ranks import RankError
from foretell.sequence import Sequence
from foretell.server import heaps
from foretell.server.errors import ApiError

log = logging.getLogger("foretell.server")
LONGEST_STEP = 10.0
"""Seconds that the end waits for the step in progress."""
REST = 1.0
"""Seconds without work after which memory that nobody uses goes back to the system, and what was
learnt of drafts is kept."""


class Flight:
    """The answers of one request on their way. Lives on the event loop."""

    def __init__(self, bridge: Bridge, sequences: list[Sequence], timeout: float) -> None:
        self.bridge = bridge
        self.followers = [Follower(sequence) for sequence in sequences]
        self.results: list[Result | None] = [None] * len(sequences)
        self.news: asyncio.Queue[list[tuple[int, Delta]] | ApiError] = asyncio.Queue()
        self.closed = False
        self.timeout = timeout
        self._alarm = asyncio.get_running_loop().call_later(timeout, self._late)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Each answer's number and what is new of it, up to the last one's end.

        Raises:
            ApiError: time is up (504), the engine stopped (503), an answer failed (500).
        """
        while None in self.results:
            news = await self.news.get()
            if isinstance(news, ApiError):
                raise news
            for index, delta in news:
                if delta.result is not None:
                    self.results[index] = delta.result
                    grammar = self.followers[index].sequence.grammar
                    if grammar and grammar.problem:
                        raise ApiError(400, f"grammar: {grammar.problem}", param="grammar")
                    if delta.result.error:
                        raise ApiError(500, delta.result.error, code="answer_failed")
                yield index, delta

    def _late(self) -> None:
        message = "the request took longer than the server allows"
        self.news.put_nowait(ApiError(504, message, code="timeout"))

    def close(self) -> None:
        """Ends what has not ended, within the engine's next step. May be called twice."""
        self._alarm.cancel()
        if not self.closed:
            self.closed = True
            self.bridge.leave(self)


class Bridge:
    """Runs an engine for an event loop.

    Args:
        llm: nobody else may use it meanwhile.
        max_queue: answers that may wait, beside the `max_num_seqs` that run.
    """

    def __init__(self, llm: LLM, max_queue: int) -> None:
        self.llm, self.engine = llm, llm.engine
        self.most = llm.config.max_num_seqs + max_queue
        self.num_open = 0
        self._open: set[Flight] = set()
        self.typical_seconds = 1.0  # of an answer, averaged over the last ones
        self.stopped: str | None = None
        """Why no request is taken, None while they are."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrivals: deque[Flight] = deque()
        self._flights: list[Flight] = []  # of the thread alone
        self._wake = threading.Event()
        self._end = False
        self._failures = 0  # steps that failed in a row
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- on the event loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Drops what is in flight and ends the thread."""
        self.stopped = self.stopped or "the server is shutting down"
        self._end = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, LONGEST_STEP)

    def dismiss(self) -> None:
        """Time is up for all that is in flight."""
        self.stopped = self.stopped or "the server is shutting down"
        for flight in self._open:
            error = ApiError(503, self.stopped, code="unavailable", retry_after=5)
            flight.news.put_nowait(error)

    def submit(self, sequences: list[Sequence], timeout: float) -> Flight:
        """Queues the answers of one request; ids must not be in flight already.

        Raises:
            ApiError: the queue is full (429) or the engine has stopped (503).
        """
        if self.stopped:
            raise ApiError(503, self.stopped, code="unavailable", retry_after=5)
        if self.num_open + len(sequences) > self.most:
            wait = max(1, round(self.typical_seconds))
            raise ApiError(
                429,
                f"the queue is full: {self.num_open} answers in progress, {self.most} at most",
                code="queue_full",
                retry_after=min(wait, 60),
            )
        flight = Flight(self, sequences, timeout)
        self.num_open += len(sequences)
        self._open.add(flight)
        self._arrivals.append(flight)  # before its sequences: no step goes by unfollowed
        for sequence in sequences:
            self.engine.add(sequence)
        self._wake.set()
        return flight

    def leave(self, flight: Flight) -> None:
        self.num_open -= len(flight.followers)
        self._open.discard(flight)
        left = [f.sequence for f in flight.followers if not f.ended]
        for name in {sequence.request_id for sequence in left}:
            self.engine.abort(name)
        self._wake.set()
        for result in filter(None, flight.results):
            if result.stats.last_token:
                seconds = result.stats.last_token - result.stats.arrival
                self.typical_seconds += 0.1 * (seconds - self.typical_seconds)

    def _deliver(self, news: list[tuple[Flight, list[tuple[int, Delta]] | ApiError]]) -> None:
        for flight, part in news:
            flight.news.put_nowait(part)

    # ---- on the engine's thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._end:
                    self._wake.clear()
                    if self.engine.has_work:
                        self._step()
                    elif not self._end and not self._wake.wait(REST):
                        heaps.trim()
                        self.llm.remember()
                        self._wake.wait()
            self.llm.remember()
        except BaseException as error:
            self.stopped = "the engine has failed; see the server's log"
            if isinstance(error, RankError):
                self.stopped = f"the engine has failed: {error}"
            log.critical("the engine has failed", exc_info=error)
            raise
        finally:
            self._take_in()
            reason = self.stopped or "the server is shutting down"
            self._send([(flight, ApiError(503, reason)) for flight in self._flights])

    def _step(self) -> None:
        try:
            if self.engine.device.overlaps:
                self.engine.step(self._tell)
            else:
                self.engine.step()
            self._failures = 0
        except RankError:  # no later step could do better
            raise
        except Exception as error:
            log.error("a step failed", exc_info=error)
            self._failures += 1
            if self._failures > 1:  # once may be bad luck, and a step can be repeated
                self.engine.fail_running(f"the model's pass failed: {type(error).__name__}")
                self._failures = 0
        if not (self.engine.device.overlaps and self.engine.has_work):
            self._tell()

    def _tell(self) -> None:
        """Sends what the last step added; while the next one computes, where it does so beside
        this thread."""
        self._take_in()
        news: list[tuple[Flight, list[tuple[int, Delta]] | ApiError]] = []
        for flight in self._flights:
            part = [(i, d) for i, f in enumerate(flight.followers) if (d := f.delta())]
            if part:
                news.append((flight, part))
        self._flights = [f for f in self._flights if not all(x.ended for x in f.followers)]
        self._send(news)

    def _take_in(self) -> None:
        while self._arrivals:
            self._flights.append(self._arrivals.popleft())

    def _send(self, news: list[tuple[Flight, list[tuple[int, Delta]] | ApiError]]) -> None:
        if not news or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, news)
        except RuntimeError:  # the loop is closed: nobody is left to read it
            log.debug("answers without a reader at the end")
