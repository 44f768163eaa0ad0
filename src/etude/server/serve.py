"""The server as an ASGI application: its parts put together, its smaller routes, and its run loop."""

import asyncio
import gc
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import metadata
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from starlette.concurrency import run_in_threadpool

from etude.algorithms.algorithm import load_algorithms
from etude.core.errors import EtudeError, StoreError
from etude.server.backend import Backend, EmbeddedBackend, VllmBackend
from etude.server.database import open_database
from etude.server.engines import EnginePool, inference_routes
from etude.server.files import FileStore, file_routes
from etude.server.guard import HANDLED, Metrics, answer_error, guard_app
from etude.server.jobs import JobStore, job_routes
from etude.server.models import ModelStore, weights_routes
from etude.server.scheduler import Scheduler
from etude.server.settings import ServerSettings, training_processes
from etude.show.logs import show_logs
from etude.store.files import SERVER_DATABASE, delete_left_over, private_folder
from etude.store.run_folder import RunLock
from etude.wire.dialect import model_object
from etude.wire.http_server import ApiError, RequestChecks, listen, server_config

_LOOK_SECONDS = 0.1
_DRAIN_SECONDS = 30
"""Seconds that running requests have to finish when the server stops."""
_GRACE_SECONDS = 45.0
"""Seconds for workers and engines to end, after the running requests."""
_LOADING_GRACE_SECONDS = 3.0


def serve(settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` gets the address once the server answers requests.

    Running requests have half a minute to finish. Raises RequestError for a port in use or too
    many training processes. Raises StoreError if the data folder is unusable or in use. A base model that
    cannot be loaded raises its own EtudeError.
    """
    if settings.api_key is not None:
        for name in [name for name, value in os.environ.items() if value == settings.api_key]:
            del os.environ[name]  # Processes that train get the rest.
    # Check CUDA with NVML, because CUDA itself would be unusable after a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    load_algorithms(settings.algorithms)
    training_processes(settings)
    show_logs(settings.log_level)
    with listen(settings.host, settings.port) as listening:
        try:
            private_folder(settings.data_dir)
        except OSError as error:
            raise StoreError(f"{settings.data_dir}: {error.strerror}; choose another --data-dir") from error
        try:  # Two servers in one data folder would start the same jobs.
            lock = RunLock(settings.data_dir / "lock")
        except StoreError as error:
            raise StoreError(
                f"{settings.data_dir} is in use by another server; stop it, or choose another --data-dir"
            ) from error
        with lock:
            delete_left_over(settings.data_dir)
            backend = VllmBackend(settings) if settings.engine == "vllm" else EmbeddedBackend(settings)
            _run(create_app(settings, backend), backend, listening, on_ready)


def _run(
    app: RequestChecks, backend: Backend, listening: socket.socket, on_ready: Callable[[str], None]
) -> None:
    host, port = listening.getsockname()[:2]

    class Server(uvicorn.Server):
        """A uvicorn server that loads the base model first, and reports when it is ready."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Begin to end, with a time limit, because a thread that loads a model cannot be stopped."""
            super().handle_exit(sig, frame)
            seconds = _DRAIN_SECONDS + _GRACE_SECONDS if self.started else _LOADING_GRACE_SECONDS
            last = threading.Timer(seconds, os._exit, [128 + sig])
            last.daemon = True
            last.start()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # Before anything is served, so that a model that cannot be loaded fails the command.
            opening = asyncio.ensure_future(backend.open())
            while not (opening.done() or self.should_exit):  # Nothing else looks for a signal yet.
                await asyncio.wait({opening}, timeout=_LOOK_SECONDS)
            if self.should_exit:
                opening.cancel()
            try:
                await opening
            except (EtudeError, asyncio.CancelledError) as error:
                await backend.close()
                if isinstance(error, EtudeError):
                    raise
                return
            gc.freeze()  # Garbage collection of lasting objects (models, modules) took up to 0.2 s at a time.
            await super().startup(sockets)
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    config = server_config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=_DRAIN_SECONDS)
    Server(config).run(sockets=[listening])


_ABOUT = """OpenAI's API over models that this machine runs and trains.

Point any OpenAI client here: `OpenAI(base_url="http://this-server/v1", api_key="…")`.
"""


def create_app(settings: ServerSettings, backend: Backend) -> RequestChecks:
    """Return the application. `backend` is opened when the server starts.

    Raises StoreError if the data folder cannot be used.
    """
    database = open_database(settings.data_dir / SERVER_DATABASE)
    models = ModelStore(database, settings.data_dir, settings.name)
    pool = EnginePool(settings, models, backend)
    files, jobs = FileStore(database, settings.data_dir, lambda: backend.codec), JobStore(database)
    scheduler = Scheduler(settings, jobs, files, models, pool)
    metrics = Metrics(jobs.counts, lambda: pool.sequences)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        scheduler.start()
        try:
            yield
        finally:
            await scheduler.stop()
            await pool.close()
            await backend.close()
            database.dispose()

    app = FastAPI(
        title="etude",
        version=metadata.version("etude"),
        description=_ABOUT,
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers=dict.fromkeys(HANDLED, answer_error),
    )
    for router in (
        _routes(models, pool, metrics),
        inference_routes(pool, metrics),
        file_routes(files),
        job_routes(jobs, files, models, scheduler.wake),
        weights_routes(settings, models),
    ):
        app.include_router(router)
    return guard_app(app, settings)


def _routes(models: ModelStore, pool: EnginePool, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", summary="List the models", tags=["models"])
    def list_models() -> dict[str, Any]:
        """List the base model, and the models and checkpoints of all jobs."""
        return {"object": "list", "data": pool.models()}

    @router.get("/v1/models/{model:path}", summary="Retrieve a model", tags=["models"])
    def retrieve_model(model: str) -> dict[str, Any]:
        return model_object(model, models.get(model).created)

    @router.delete("/v1/models/{model:path}", summary="Delete a fine-tuned model", tags=["models"])
    async def delete_model(model: str) -> dict[str, Any]:
        """Delete a job's model and its weights. Jobs that need it and have not started yet will fail."""
        name = models.get(model).name
        if name == models.base.name:
            raise ApiError(400, "the base model cannot be deleted", param="model")
        await run_in_threadpool(models.delete, name)
        await pool.forget(name)
        return {"id": model, "object": "model", "deleted": True}

    @router.post("/engine/start", summary="Bring the engine back")
    async def start_engine() -> dict[str, Any]:
        """Resume serving. Returns when the base model is in memory. Does nothing if it already is."""
        await pool.start()
        return pool.status()

    @router.post("/engine/stop", summary="Put the engine away")
    async def stop_engine() -> dict[str, Any]:
        """Let running requests finish, and free the device. New requests wait, or get 503."""
        await pool.stop()
        return pool.status()

    @router.get("/engine/status", summary="Report what the engine does")
    async def engine_status() -> dict[str, Any]:
        """Return `running`, `stopping` or `stopped`, and the models in memory."""
        return pool.status()

    @router.get("/health", summary="Is the server up")
    async def health() -> dict[str, str]:
        """Answer as long as the server runs. For its engine, ask `/engine/status`."""
        return {"status": "ok"}

    @router.get("/version", summary="Which etude this is")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("etude")}

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    def prometheus() -> Response:
        """Return tokens, queue and jobs in Prometheus's text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
