"""From a checked request to its answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foretell.llm import LLM
from foretell.sequence import Sequence
from foretell.server.bridge import Flight
from foretell.server.errors import ApiError
from foretell.server.metrics import ServerMetrics
from foretell.server.reply import DONE, Logprobs, Report, Shape, event, usage
from foretell.server.tools import Calls

log = logging.getLogger("foretell.server")
PATIENCE = 1.0
"""Seconds to tell a client that its time is up."""


class Answering:
    """One request's answers on their way out.

    Args:
        flight: what the engine works on.
        num_prompts: prompts in the request; each has the same number of answers.
        report: say what each step owed to the draft.
        calls: how the model calls tools, where it was told of any.
    """

    def __init__(
        self,
        llm: LLM,
        metrics: ServerMetrics,
        flight: Flight,
        shape: Shape,
        *,
        num_prompts: int,
        report: bool,
        calls: Calls | None,
        notes: dict[str, Any],
    ) -> None:
        self.flight, self.shape, self.metrics = flight, shape, metrics
        self.num_prompts = num_prompts
        self.notes = notes
        sequences = [follower.sequence for follower in flight.followers]
        self.splitters = [calls.splitter() if calls else None for _ in sequences]
        self.logprobs = [_logprobs(llm, sequence) for sequence in sequences]
        self.reports = [Report(llm.tokenizer, s) if report else None for s in sequences]

    async def whole(self, request: Request) -> Response:
        """The answer in one body; a client that goes away ends it."""
        try:
            if not await _while_there(request.receive, self._read()):
                return Response(status_code=499)
        finally:
            self.close()
        choices = [
            self.shape.choice(i, result, self.logprobs[i], self.splitters[i])
            for i, result in enumerate(self.flight.results)
            if result is not None
        ]
        return JSONResponse(self.shape.body(choices, self.usage))

    async def _read(self) -> None:
        async for _ in self.flight.deltas():
            pass

    async def events(self, with_usage: bool) -> AsyncIterator[str]:
        """The answer as it comes. What goes wrong on the way is an event too."""
        more = {"usage": None} if with_usage else {}
        try:
            if self.shape.chat:
                for index in range(len(self.flight.results)):
                    yield self.shape.chunk([self.shape.first(index)], **more)
            async for index, delta in self.flight.deltas():
                of_answer = self.logprobs[index], self.reports[index], self.splitters[index]
                part = self.shape.part(index, delta, *of_answer)
                if part is not None:
                    yield self.shape.chunk([part], **more)
        except ApiError as error:
            self.notes["error"] = str(error)
            yield event(error.body)
            return
        if with_usage:
            yield self.shape.chunk([], usage=self.usage)
        yield DONE

    @property
    def usage(self) -> dict[str, Any]:
        return usage(self.flight.results, self.num_prompts)

    def close(self) -> None:
        """Ends what has not ended and takes it into the books."""
        if self.flight.closed:
            return
        self.flight.close()
        self.metrics.ended(self.flight.results)
        done = [r for r in self.flight.results if r is not None]
        self.notes |= {
            "prompt_tokens": sum(f.sequence.num_prompt for f in self.flight.followers),
            "completion_tokens": sum(r.stats.num_tokens for r in done),
            "accepted_tokens": sum(r.stats.accepted for r in done),
            "finish_reasons": [str(r.finish_reason) if r else "abort" for r in self.flight.results],
        }


class EventStream(Response):
    """Sends events until they end or the client goes away, noticed even while nothing is sent."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, with_usage: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.answering, self.with_usage = answering, with_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A client that reads nothing keeps its place no longer than others may.
            limit = self.answering.flight.timeout + PATIENCE
            await _while_there(receive, self._send(send), limit)
        finally:
            self.answering.close()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async for text in self.answering.events(self.with_usage):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_there(
    receive: Receive, work: Coroutine[Any, Any, None], limit: float | None = None
) -> bool:
    """Works until that is done, time is up, or the client goes away; is it done?"""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        ends = asyncio.FIRST_COMPLETED
        await asyncio.wait({doing, leaving}, timeout=limit, return_when=ends)
        return doing.done() and doing.result() is None
    finally:
        doing.cancel()
        leaving.cancel()


def _logprobs(llm: LLM, sequence: Sequence) -> Logprobs | None:
    top = sequence.params.logprobs
    return None if top is None else Logprobs(llm.tokenizer, top)
