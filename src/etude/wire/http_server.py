"""Every HTTP server of Etude: an application on a listening socket, by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from etude.core.errors import RequestError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

_SHUTDOWN_SECONDS = 1
_CLOSE_SECONDS = 5.0
"""For a server in a thread to end."""
_BACKLOG = 512
MOST_CONNECTIONS = 8192
"""Of a server that is not told how many: agents of one run may be thousands, each with a pool of them."""
_OTHER_FILES = 256
"""Open files that a server needs beside its connections."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises RequestError when that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        in_use = f"port {port} on {host} is in use by another program; stop it"
        other = f"cannot listen on {host}:{port}: {error.strerror}"
        reason = in_use if error.errno == errno.EADDRINUSE else other
        raise RequestError(f"{reason}, or choose another port (0 takes a free one)") from error
    # Connections inherit it. asyncio would set it only where the socket was made with IPPROTO_TCP, and an
    # answer whose head and body are two writes waits 40 ms for the client's delayed acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return listening


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def server_config(app: ASGIApp, *, connections: int = MOST_CONNECTIONS, **options: Any) -> uvicorn.Config:
    """uvicorn's config for an application that is within `RequestChecks`.

    Where there are more than so many `connections`, idle ones among them, a request is answered with 503.
    """
    import uvicorn

    _allow_connections(connections)
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        **{"lifespan": "off", "timeout_graceful_shutdown": _SHUTDOWN_SECONDS, **options},
    )


class BackgroundServer:
    """A server beside other work of the running event loop; signals are not for it."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        """Answers from now on; `app` is within `RequestChecks`."""
        self._server = _quiet_server(app)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Stop listening and end the requests under way."""
        self._server.should_exit = True
        await self._task


class ThreadServer:
    """A server with an event loop of its own, in a thread: it answers whatever else the process does."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        """Answers from now on; `app` is within `RequestChecks`."""
        self._server = _quiet_server(app)
        serving = self._server.serve(sockets=[listening])
        self._thread = threading.Thread(target=asyncio.run, args=[serving], name="etude-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the requests under way."""
        self._server.should_exit = True
        self._thread.join(timeout=_CLOSE_SECONDS)


def _quiet_server(app: ASGIApp) -> uvicorn.Server:
    """Logs errors only, and leaves signals to whom they are for."""
    import uvicorn

    server = uvicorn.Server(server_config(app, log_level="error"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    return server


def _allow_connections(count: int) -> None:
    """Let this process have so many connections open, as far as the system allows it."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
