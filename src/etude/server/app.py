"""The server's parts put together as an ASGI application, and its smaller routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from starlette.concurrency import run_in_threadpool

from etude.server.backend import Backend
from etude.server.database import open_database
from etude.server.engines import EnginePool
from etude.server.errors import add_error_handlers
from etude.server.extensions import ServerParts, load_extensions
from etude.server.files import FileStore, file_routes
from etude.server.guard import Guard, Metrics, server_version
from etude.server.inference import Inference, inference_routes
from etude.server.jobs import JobStore
from etude.server.jobs_api import job_routes
from etude.server.models import ModelStore, weights_routes
from etude.server.scheduler import Scheduler
from etude.server.settings import ServerSettings
from etude.store.files import SERVER_DATABASE
from etude.wire.api_error import ApiError

_ABOUT = """OpenAI's API over models that this machine runs and trains.

Point any OpenAI client here: `OpenAI(base_url="http://this-server/v1", api_key="…")`.
"""


def create_app(settings: ServerSettings, backend: Backend) -> Guard:
    """The application; `backend` is open.

    Raises StoreError when the data folder cannot be used, RequestError when an extension cannot be loaded.
    """
    extensions = load_extensions()
    database = open_database(settings.data_dir / SERVER_DATABASE)
    names = [extension.names for extension in extensions]
    models = ModelStore(database, settings.data_dir, settings.name, names)
    pool = EnginePool(settings, models, backend)
    files, jobs = FileStore(database, settings.data_dir, lambda: backend.speech), JobStore(database)
    scheduler = Scheduler(settings, jobs, pool)
    parts = ServerParts(settings, database, files, jobs, models, pool, scheduler.wake)
    metrics = Metrics(jobs.counts, lambda: pool.sequences)

    def tells_tokens(model: str) -> bool:
        return any(extension.tells_tokens(model) for extension in extensions)

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
        version=server_version(),
        description=_ABOUT,
        lifespan=lifespan,
        redoc_url=None,
    )
    add_error_handlers(app)
    for router in (
        _model_routes(models, jobs, pool),
        inference_routes(Inference(pool, metrics, settings.name), tells_tokens),
        file_routes(files),
        job_routes(settings, jobs, files, models, scheduler.wake),
        weights_routes(settings, models),
        _engine_routes(pool),
        _status_routes(metrics),
        *(router for extension in extensions for router in extension.routes(parts)),
    ):
        app.include_router(router)
    return Guard(app, settings, metrics, extensions)


def _model_routes(models: ModelStore, jobs: JobStore, pool: EnginePool) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", summary="List the models")
    def list_models() -> dict[str, Any]:
        """The base model, all that jobs have made, checkpoints included, and other names for them."""
        return {"object": "list", "data": [model.as_wire() for model in models.all()]}

    @router.get("/{model:path}", summary="Retrieve a model")
    def retrieve_model(model: str) -> dict[str, Any]:
        """One model by its name."""
        return models.get(model).as_wire() | {"id": model}

    @router.delete("/{model:path}", summary="Delete a fine-tuned model")
    async def delete_model(model: str) -> dict[str, Any]:
        """Forget a model that a job made, and delete its weights; 409 while a job needs it."""
        name = models.get(model).name
        if name == models.base.name:
            raise ApiError(400, "the base model cannot be deleted", param="model")
        await run_in_threadpool(jobs.require_unneeded, name, models.stands_for)
        models.delete(name)
        await pool.forget(name)
        return {"id": model, "object": "model", "deleted": True}

    return router


def _engine_routes(pool: EnginePool) -> APIRouter:
    router = APIRouter(prefix="/engine", tags=["engine"])

    @router.post("/start", summary="Bring the engine back")
    async def start_engine() -> dict[str, Any]:
        """Serve again; returns when the base model is in memory. Does nothing where it is."""
        await pool.start()
        return pool.status()

    @router.post("/stop", summary="Put the engine away")
    async def stop_engine() -> dict[str, Any]:
        """Let requests under way finish, and free the device. New requests wait, or get 503."""
        await pool.stop()
        return pool.status()

    @router.get("/status", summary="Say what the engine does")
    async def engine_status() -> dict[str, Any]:
        """`running`, `stopping` or `stopped`, and the models in memory."""
        return pool.status()

    return router


def _status_routes(metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/health", summary="Is the server up")
    async def health() -> dict[str, str]:
        """Answers as long as the server does; `/engine/status` is about its engine."""
        return {"status": "ok"}

    @router.get("/version", summary="Which etude this is")
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": server_version()}

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    def prometheus() -> Response:
        """Requests, tokens, queue and jobs, in Prometheus's text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
