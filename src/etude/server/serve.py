"""Running the server until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from etude.algorithms.algorithm import load_algorithms
from etude.core.errors import EtudeError, StoreError
from etude.core.secrets import keep_secret
from etude.report.logs import show_logs
from etude.server.app import create_app
from etude.server.backend import Backend, EmbeddedBackend, VllmBackend
from etude.server.guard import Guard
from etude.server.settings import ServerSettings, require_safe, training_processes
from etude.store.files import delete_left_over, private_folder
from etude.store.lock import RunLock
from etude.wire.http_server import listen, server_config

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 45.0
"""For workers and engines to end, after the requests under way."""
_LOADING_GRACE_SECONDS = 3.0


class ServeError(EtudeError):
    """The server could not start."""


def serve(settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the address once requests are answered.

    Requests under way have `settings.drain` seconds to finish. Raises RequestError for unsafe settings,
    a port in use or too many training processes, StoreError when the data folder is unusable or in use,
    ServeError when the model cannot be loaded.
    """
    require_safe(settings)
    if settings.api_key is not None:
        keep_secret(settings.api_key.get_secret_value())
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
    app: Guard,
    backend: Backend,
    settings: ServerSettings,
    listening: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    host, port = listening.getsockname()[:2]

    class Server(uvicorn.Server):
        """Tells when it is ready, and why it cannot be."""

        error: EtudeError | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Begin to end, and be over in time: a thread that loads a model cannot be stopped."""
            super().handle_exit(sig, frame)
            seconds = settings.drain + _GRACE_SECONDS if self.started else _LOADING_GRACE_SECONDS
            last = threading.Timer(seconds, os._exit, [128 + sig])
            last.daemon = True
            last.start()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # Before anything is served: a model that cannot be loaded is an error of the command.
            opening = asyncio.ensure_future(backend.open())
            while not (opening.done() or self.should_exit):
                await asyncio.wait({opening}, timeout=_LOOK_SECONDS)
            if self.should_exit:  # By a signal, which nobody but this loop looks at yet.
                opening.cancel()
                await asyncio.wait({opening})
                await backend.close()
                return
            try:
                opening.result()
            except EtudeError as error:
                self.error, self.should_exit = error, True
                await backend.close()
                return
            gc.freeze()  # To look through what stays, models and modules, took 0.2 s now and then.
            await super().startup(sockets)
            if self.started:
                on_ready(f"http://{host}:{port}")

    config = server_config(
        app,
        connections=settings.max_connections,
        log_config=None,
        lifespan="on",
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
        private_folder(settings.data_dir)
    except OSError as error:
        raise StoreError(f"{settings.data_dir}: {error.strerror}; choose another --data-dir") from error
    try:
        lock = RunLock(settings.data_dir / "lock")
    except StoreError as error:
        raise StoreError(
            f"{settings.data_dir} is in use by another server; stop it, or choose another --data-dir"
        ) from error
    delete_left_over(settings.data_dir)
    return lock
