"""Running the server until it is stopped."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from etude.algorithms.algorithm import load_algorithms
from etude.core.errors import EtudeError, StoreError
from etude.report.logs import show_logs
from etude.server.app import create_app
from etude.server.backend import Backend, EmbeddedBackend, VllmBackend
from etude.server.settings import ServerSettings, require_safe, training_processes
from etude.store.lock import RunLock
from etude.wire.dialect import error_object
from etude.wire.endpoint import listen

_LOOK_SECONDS = 0.1


def patient_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, with a limit to the time from the beginning of a connection, or from the last
    answer, to the end of a request's head. A body has limits of its own."""

    class PatientProtocol(H11Protocol):
        """Closes connections whose client sends nothing, or a byte now and then."""

        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._head is not None:
                self._head.cancel()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            if self._head is not None:
                self._head.cancel()
            self._head = self.loop.call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            under_way = self.cycle is not None and not self.cycle.response_complete
            if not under_way and not self.transport.is_closing():
                self.transport.write(f"{head}content-type: application/json\r\n\r\n{body}".encode())
                self.transport.close()

    body = json.dumps(error_object(408, "the request did not come in time", code="timeout"))
    head = f"HTTP/1.1 408 Request Timeout\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return PatientProtocol


class ServeError(EtudeError):
    """The server could not start."""


def serve(settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the address once requests are answered.

    Requests under way have `settings.drain` seconds to finish. Raises RequestError for unsafe settings,
    a port in use or too many training processes, StoreError when the data folder is unusable or in use,
    ServeError when the model cannot be loaded.
    """
    require_safe(settings)
    load_algorithms(settings.algorithms)
    training_processes(settings)
    show_logs(settings.log_level)
    with listen(settings.host, settings.port) as listening:
        lock = _lock(settings)
        try:
            backend = VllmBackend(settings) if settings.engine == "vllm" else EmbeddedBackend(settings)
            _run(create_app(settings, backend), backend, settings, listening, on_ready)
        finally:
            lock.release()


def _run(
    app: ASGIApp,
    backend: Backend,
    settings: ServerSettings,
    listening: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    host, port = listening.getsockname()[:2]

    class Server(uvicorn.Server):
        """Tells when it is ready, and why it cannot be."""

        error: EtudeError | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # Before anything is served: a model that cannot be loaded is an error of the command.
            opening = asyncio.ensure_future(backend.open())
            while not (opening.done() or self.should_exit):
                await asyncio.wait({opening}, timeout=_LOOK_SECONDS)
            if self.should_exit:  # By a signal, which nobody but this loop looks at yet.
                opening.cancel()
                await asyncio.wait({opening})
                await backend.put_away()
                return
            try:
                opening.result()
            except EtudeError as error:
                self.error, self.should_exit = error, True
                return
            await super().startup(sockets)
            if self.started:
                on_ready(f"http://{host}:{port}")

    config = uvicorn.Config(
        app,
        http=patient_protocol(settings.body_timeout),
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain)),
    )
    server = Server(config)
    server.run(sockets=[listening])
    if server.error is not None:
        raise server.error
    if not server.started:
        raise ServeError("the server could not start; the lines above say why")


def _lock(settings: ServerSettings) -> RunLock:
    """One server in a data folder: two would start the same jobs."""
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{settings.data_dir}: {error.strerror}; choose another --data-dir") from error
    try:
        return RunLock(settings.data_dir / "lock")
    except StoreError as error:
        raise StoreError(
            f"{settings.data_dir} is in use by another server; stop it, or choose another --data-dir"
        ) from error
