"""What stands before every route: request ids, the key, the size of bodies, and one log line."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import sys
import time
from ipaddress import ip_address
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretell.server.errors import ApiError
from foretell.server.metrics import ServerMetrics

log = logging.getLogger("foretell.server.requests")
OPEN = {"/", "/health", "/openapi.json"}
"""Paths that need no key, beside the page's parts: they tell nothing of what is asked."""
_LOGGERS = {"uvicorn.error": "uvicorn"}  # what it has to say, errors or not
BODY_TIMEOUT = 60.0
"""Seconds that a body may take to come."""
_METHODS = {"GET", "POST", "OPTIONS", "HEAD"}
_ID = re.compile(r"[\w.:-]{1,64}")


def _is_local(host: str) -> bool:
    """Is it a name or an address of this machine itself?"""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware, the outermost one.

    Args:
        api_key: None lets everybody in.
        max_body: bytes.
        host: that the server listens on. Without a key and on this machine alone, requests must
            name this machine too: a web page whose name was made to point here is turned away.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_body: int, host: str, metrics: ServerMetrics
    ) -> None:
        self.app = app
        self.only_local = api_key is None and _is_local(host)
        self.key = None if api_key is None else f"Bearer {api_key}".encode()
        self.max_body = max_body
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else secrets.token_hex(12)
        notes: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=name, notes=notes)
        start, status = time.perf_counter(), 499  # nobody was there to be answered

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            error = self._refuse(scope, headers)
            if error is not None:
                await error.response()(scope, receive, answer)
            else:
                await self.app(scope, self._counted(receive), answer)
        finally:
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.requests.labels(route, method, str(status)).inc()
            log.info(
                "request",
                extra={
                    "fields": {
                        "request_id": name,
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": status,
                        "seconds": round(seconds, 4),
                        **notes,
                    }
                },
            )

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        preflight = scope["method"] == "OPTIONS"  # carries no key by its nature, and does nothing
        path = scope["path"]
        free = path in OPEN or path.startswith("/page/") or preflight
        if self.key is not None and not free:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self.key):
                message = "send the server's key as Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key")
        named = headers.get(b"host", b"").decode("latin-1")
        # No browser leaves the name out.
        if self.only_local and named and not _is_local(re.sub(r":\d*$", "", named)):
            message = f"this server answers to localhost only, not to {named!r}; with --api-key it "
            return ApiError(403, message + "answers to every name", code="unknown_host")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    def _counted(self, receive: Receive) -> Receive:
        """Bodies that do not say how long they are, or that never end."""
        taken, whole = 0, False
        end = asyncio.get_running_loop().time() + BODY_TIMEOUT

        async def counted() -> Message:
            nonlocal taken, whole
            if whole:  # what comes now is the client's leaving
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not come to its end") from None
            whole = not message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > self.max_body:
                raise HTTPException(413, self._too_large)
            return message

        return counted

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self.max_body} bytes, the most this server takes"


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": _LOGGERS.get(record.name, record.name),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Everything that is logged in this process goes to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").disabled = True  # the guard's lines say more
