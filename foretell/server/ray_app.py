"""Engines behind one address, on Ray Serve: replicas of the server, and a router before them.

A replica is an engine behind the same application as `foretell serve`, called without a socket; so
the API is the same. The router reads a request, chooses a replica (`server/replicas`) and passes
on what that says. As long as nothing was passed on, a request whose replica is lost is asked again
of another one; a stream that has begun ends with an error event.
"""

# pyright: reportMissingImports=false, reportFunctionMemberAccess=false, reportArgumentType=false
# (Ray is an extra, and its types do not say what its documentation does.)

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from foretell.config import EngineConfig, ServerConfig, SpeculationConfig, parse_memory
from foretell.server.errors import ApiError
from foretell.server.replicas import choose, conversation, joint_health, joint_metrics, wanted

_TRIES = 3
"""Replicas that a request is asked of: one that kills whoever reads it must not kill them all."""
_LAST_WORDS = 1.0
"""Seconds in which the requests of an engine that has failed are told so."""
_FAREWELL = 5.0
"""Seconds that a router outlives replicas whose time is up: it tells their clients."""
_LOST = (RayError, RayServeException)


class PrefixRouter(RequestRouter):
    """Ray's way to ask `replicas.choose`. A request's first argument is its conversation."""

    def initialize_state(self, **kwargs: int) -> None:
        self.margin = kwargs["margin"]
        self.open: dict[ReplicaID, int] = {}  # requests in progress that went through here

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        key = pending_request.args[0] if pending_request else None
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        loads = {name: self._load(replica.replica_id) for name, replica in replicas.items()}
        first = choose(key, loads, self.margin)
        rest = sorted(replicas.keys() - {first}, key=loads.__getitem__)
        return [[replicas[name]] for name in (first, *rest)]

    def _load(self, replica: ReplicaID) -> int:
        # What the replica has last told, of other routers' requests too, is forgotten after a time.
        return max(self.open.get(replica, 0), self.replica_queue_len_cache.get(replica) or 0)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.open[replica_id] = self.open.get(replica_id, 0) + 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        left = self.open.pop(replica_id, 1) - 1
        if left:
            self.open[replica_id] = left


def replicas_wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Ray's way to ask `replicas.wanted`."""
    assert context.config is not None
    in_use = (context.aggregated_metrics or {}).get("pages_in_use", {}).values()
    each = context.config.get_target_ongoing_requests()
    now = context.current_num_replicas
    return wanted(now, context.total_num_requests, each, in_use), {}


class Replica:
    """An engine and its application."""

    async def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        from foretell.llm import LLM  # heavy: the router does without
        from foretell.server.app import create_app
        from foretell.server.guard import log_as_json

        log_as_json()
        key = server.api_key or os.environ.get("FORETELL_API_KEY") or None
        server = dataclasses.replace(server, api_key=key)
        self.llm = LLM(**_fields(engine))
        self.app = create_app(self.llm, server)
        self.service = self.app.state.service
        self._life = self.app.router.lifespan_context(self.app)
        await self._life.__aenter__()
        self._tasks: set[asyncio.Future[None]] = set()

    async def __del__(self) -> None:  # Serve calls it when the last request is answered
        await self._life.__aexit__(None, None, None)
        self.llm.close()

    async def check_health(self) -> None:
        if self.service.bridge.stopped:
            raise RuntimeError(self.service.bridge.stopped)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        cache = self.llm.engine.cache
        return {"pages_in_use": 1 - cache.num_free / cache.num_pages}

    async def answer(
        self, key: str | None, scope: Scope, body: bytes
    ) -> AsyncIterator[list[Message]]:
        """What the application sends, all that has come up at a time."""
        if self.service.bridge.stopped:  # for good: Ray starts another replica
            await asyncio.sleep(_LAST_WORDS)
            os._exit(1)
        news: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self.app(scope, receive, news.put))
        self._tasks.add(task)
        task.add_done_callback(lambda _: (self._tasks.discard(task), news.put_nowait(None)))
        try:
            ended = False
            while not ended:
                messages = [await news.get()]
                while not news.empty():
                    messages.append(news.get_nowait())
                ended = messages[-1] is None
                if some := [message for message in messages if message is not None]:
                    yield some
        finally:
            gone.set()

    async def whole(self, scope: Scope) -> tuple[str, int, bytes]:
        """The answer to a request without a body: this replica's name, status, body."""
        sent = [message async for part in self.answer(None, scope, b"") for message in part]
        body = b"".join(message.get("body", b"") for message in sent)
        return serve.get_replica_context().replica_id.unique_id, sent[0]["status"], body


class Router:
    """What stands before the replicas: one for each address.

    Args:
        replicas: a handle of `Replica`.
    """

    def __init__(self, replicas: Any, server: ServerConfig) -> None:
        self.replicas = replicas.options(method_name="answer", stream=True)
        self.server = server
        self.max_body = int(parse_memory(server.max_body))

    async def __call__(self, http: Request) -> Response:
        scope = {name: value for name, value in http.scope.items() if name in _SCOPE}
        try:
            async with asyncio.timeout(self.server.request_timeout + 1):
                if http.url.path in ("/health", "/metrics"):
                    return await self._of_all(scope)
                body = b""
                async for part in http.stream():
                    body += part
                    if len(body) > self.max_body:  # enough for the application to refuse it
                        break
                return await self._of_one(conversation(body), scope, body)
        except TimeoutError:
            message = "no replica has answered in the time that the server allows"
            return ApiError(504, message, code="timeout").response()

    async def _of_one(self, key: str | None, scope: Scope, body: bytes) -> Response:
        for again in reversed(range(_TRIES)):
            answer = self.replicas.remote(key, scope, body)
            try:
                sent = list(await anext(answer))
                while len(sent) < 2:  # the status goes out with the first of the text
                    sent += await anext(answer)
            except (StopAsyncIteration, *_LOST):
                if again and await _ending():
                    break
                continue
            except BaseException:
                answer.cancel()
                raise
            if sent[0]["status"] != 503 or not again:
                return _PassedOn(sent, answer)
            await asyncio.sleep(0.1)
        return _lost().response()

    async def _of_all(self, scope: Scope) -> Response:
        try:
            asked = self.replicas.broadcast("whole", scope)
            parts = await asked.results_async(timeout_s=10, return_exceptions=True)
        except _LOST:
            parts = []
        parts = [part for part in parts if not isinstance(part, BaseException)]
        good = {name: body.decode() for name, status, body in sorted(parts) if status == 200}
        if not good and parts:
            return Response(parts[0][2], parts[0][1], media_type="application/json")
        if not good:
            return ApiError(503, "no replica is there yet", retry_after=5).response()
        if scope["path"] == "/health":
            return JSONResponse(joint_health([json.loads(body) for body in good.values()]))
        return PlainTextResponse(
            joint_metrics(good), headers={"Content-Type": "text/plain; version=0.0.4"}
        )


_SCOPE = {
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
}
"""Of a request's scope: what is data."""


class _PassedOn(Response):
    """A replica's answer as it comes."""

    def __init__(self, sent: list[Message], answer: Any) -> None:
        self.sent, self.answer = sent, answer
        self.background = None
        head = sent[0]
        self.status_code = head["status"]
        # Ray's proxy adds it again.
        self.raw_headers = [pair for pair in head["headers"] if pair[0] != b"x-request-id"]
        self.sent[0] = {**head, "headers": self.raw_headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages, more = self.sent, True
        try:
            while True:
                for message in messages:
                    await send(message)
                    more = message["type"] == "http.response.start" or message.get("more_body")
                messages = await anext(self.answer)
        except (StopAsyncIteration, *_LOST):
            if more:
                text = f"data: {json.dumps(_lost().body)}\n\n".encode()
                await send({"type": "http.response.body", "body": text, "more_body": False})
        finally:
            self.answer.cancel()


async def _ending() -> bool:
    """Is the application taken down? Then no other replica will come."""
    try:
        apps = (await asyncio.to_thread(serve.status)).applications
    except _LOST:
        return False
    name = serve.get_replica_context().app_name
    return name not in apps or apps[name].status == "DELETING"


def _lost() -> ApiError:
    message = "the replica that was answering has been lost; ask again"
    return ApiError(503, message, code="replica_lost", retry_after=1)


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def application(engine: EngineConfig, server: ServerConfig) -> Any:
    """The router bound to its replicas, for `ray.serve.run`. A replica takes ``engine.threads``
    CPUs (1 if not given), and a GPU for each rank where they run on GPUs; from ``server.replicas``
    to ``server.max_replicas`` of them run."""
    name = server.served_model_name or Path(engine.model).name
    server = dataclasses.replace(server, served_model_name=name)
    scaled = dict[str, Any](num_replicas=server.replicas)
    if server.max_replicas is not None:
        policy = AutoscalingPolicy(policy_function=f"{__name__}:{replicas_wanted.__name__}")
        scaled = {
            "autoscaling_config": {
                "min_replicas": server.replicas,
                "max_replicas": server.max_replicas,
                "target_ongoing_requests": engine.max_num_seqs,
                "upscale_delay_s": 10.0,
                "downscale_delay_s": 300.0,
                "policy": policy,
            }
        }
    gpus = engine.tensor_parallel if engine.device == "cuda" else 0
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)  # replicas log requests
    replica = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options={"num_cpus": engine.threads or 1, "num_gpus": gpus},
        logging_config=quiet,
        # More than an engine takes on: it is the engine that refuses what is too much.
        max_ongoing_requests=2 * (engine.max_num_seqs + server.max_queue),
        graceful_shutdown_timeout_s=server.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{__name__}.{PrefixRouter.__name__}",
            request_router_kwargs={"margin": max(1, engine.max_num_seqs // 2)},
        ),
        **scaled,
    )
    router = serve.deployment(
        Router,
        name="router",
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=server.drain_timeout + _FAREWELL,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return router.bind(replica.bind(engine, server), server)


def build(args: dict[str, Any]) -> Any:
    """`application` for a Serve config file: ``import_path: foretell.server.ray_app:build`` with
    fields of `EngineConfig` and `ServerConfig` as ``args``.

    Raises:
        ValueError: a name is unknown or a value is illegal.
    """
    args = dict(args)
    given: list[dict[str, Any]] = []
    for config in (EngineConfig, ServerConfig):
        names = [field.name for field in dataclasses.fields(config)]
        given.append({name: args.pop(name) for name in names if name in args})
    if args:
        raise ValueError(f"{next(iter(args))}: there is no such option; see foretell serve --help")
    scheme = given[0].get("speculation")
    if isinstance(scheme, str):
        given[0]["speculation"] = SpeculationConfig.parse(scheme)
    return application(EngineConfig(**given[0]), ServerConfig(**given[1]))
