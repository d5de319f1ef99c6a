"""Starts the server and sees it off."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from foretell.config import ServerConfig
from foretell.llm import LLM
from foretell.server import heaps
from foretell.server.app import create_app
from foretell.server.guard import log_as_json

_HTTP: Any = AutoHTTPProtocol  # one of two classes, by what is installed
SWITCH_INTERVAL = 0.0005
"""Seconds that a thread may keep Python to itself while another one waits."""

BACKLOG = 2048
"""Connections that may wait to be taken."""
HEAD_TIMEOUT = 30.0
"""Seconds that the head of a request may take to come."""


def serve(llm: LLM, config: ServerConfig) -> None:
    """Serves until it is told to stop (SIGINT, SIGTERM): then nothing new is taken, and answers in
    progress have ``drain_timeout`` seconds.

    Raises:
        ValueError: the address cannot be listened on.
    """
    app = create_app(llm, config)
    # A file for each connection: as many as the system lets this process have.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with listen(config.host, config.port) as listening:
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"foretell: {app.state.service.name} at http://{shown}:{port}", file=sys.stderr)
        log_as_json()
        Server(app, config).run(sockets=[listening])


class Server(uvicorn.Server):
    """Told to stop, it takes nothing new; what is not done in time is told so."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self.app, self.drain_timeout = app, config.drain_timeout
        # The engine's thread holds up the loop, and the loop the engine, no longer than this.
        sys.setswitchinterval(SWITCH_INTERVAL)
        heaps.bound()
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=round(config.drain_timeout) + 2,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        bridge = self.app.state.service.bridge
        asyncio.get_running_loop().call_later(self.drain_timeout, bridge.dismiss)
        await super().shutdown(sockets)


class Connection(_HTTP):
    """Ends where the head of a request does not come: uvicorn waits for ever once it has begun."""

    alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        asked = self.cycle is not None and not self.cycle.response_complete
        if asked and self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None
        elif not asked and self.alarm is None:
            self.alarm = self.loop.call_later(HEAD_TIMEOUT, self.transport.close)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ValueError: it is taken, or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)  # who is told of the address may call at once
    except OSError as error:
        listening.close()
        raise ValueError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another --host or --port"
        ) from None
    return listening
