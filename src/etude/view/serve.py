"""Running the view until it is stopped."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from etude.core.errors import RequestError
from etude.view.app import create_view
from etude.view.gate import new_key
from etude.view.pages import url
from etude.wire.http_server import is_loopback, listen, server_config

PORT = 7331
"""Taken where it is free, so that addresses stay the same from one day to the next."""


def serve_view(
    root: Path,
    on_ready: Callable[[str, str | None], None],
    *,
    run: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    key: str | None = None,
    shared: bool = False,
) -> None:
    """Show the runs in a folder until SIGINT or SIGTERM; `on_ready` gets the address, that of a `run` where
    one is named, and the key where it was made here.

    Raises RequestError for a port in use, and for a `host` beyond this machine unless it is `shared` and
    has a `key`.
    """
    if not is_loopback(host) and not (shared and key):
        raise RequestError(
            f"others could reach the view at {host}, and read all runs in {root}; to let in those who have a "
            "key: --share-readonly --key-env NAME, where NAME is the environment variable that has it"
        )
    import uvicorn

    with _listening(host, port) as listening:
        port, made = listening.getsockname()[1], None if key else new_key()
        app = create_view(root, key or made or "", host=host, port=port, shared=shared)
        place = f"[{host}]" if ":" in host else host
        path = url("runs", run) if run else "/"

        class Server(uvicorn.Server):
            """Tells when it is ready."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                on_ready(f"http://{place}:{port}{path}", made)

        Server(server_config(app, log_level="warning")).run(sockets=[listening])


def _listening(host: str, port: int | None) -> socket.socket:
    if port is not None:
        return listen(host, port)
    try:
        return listen(host, PORT)
    except RequestError:
        return listen(host, 0)
