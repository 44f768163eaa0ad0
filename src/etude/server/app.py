"""The server's parts put together as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from starlette.types import ASGIApp

from etude.integrations.art.serving.log import ArtLog
from etude.integrations.art.serving.models import ArtModels
from etude.integrations.art.serving.preview import preview_routes
from etude.integrations.art.serving.routes import art_routes
from etude.integrations.art.serving.trainings import ArtTrainings
from etude.server.backend import Backend
from etude.server.chat import chat_routes
from etude.server.completions import completion_routes
from etude.server.database import open_database
from etude.server.engine_api import engine_routes
from etude.server.engines import EnginePool
from etude.server.errors import add_error_handlers
from etude.server.files import FileStore
from etude.server.files_api import file_routes
from etude.server.guard import Guard
from etude.server.jobs import JobStore
from etude.server.jobs_api import algorithm_routes, job_routes
from etude.server.metrics import Metrics
from etude.server.models import ModelStore
from etude.server.models_api import model_routes
from etude.server.scheduler import Scheduler
from etude.server.settings import ServerSettings
from etude.server.versions import server_version

_ABOUT = """OpenAI's API over models that this machine runs and trains.

Point any OpenAI client here: `OpenAI(base_url="http://this-server/v1", api_key="…")`.
"""


def create_app(settings: ServerSettings, backend: Backend) -> ASGIApp:
    """The application; `backend` is open.

    Raises StoreError when the data folder cannot be used.
    """
    metrics = Metrics()
    database = open_database(settings.data_dir / "server.db")
    models = ModelStore(database, settings.data_dir, settings.name)
    pool = EnginePool(settings, models, backend)
    files, jobs = FileStore(database, settings.data_dir), JobStore(database)
    scheduler = Scheduler(settings, jobs, pool)
    art, log = ArtModels(database, models, settings.model), ArtLog(settings.data_dir)
    trainings = ArtTrainings(settings, art, models, jobs, files, log, scheduler.wake)
    metrics.watch_counts("etude_jobs", "Training jobs.", "status", jobs.counts)
    metrics.watch("etude_sequences", "Sequences under way and waiting.", lambda: pool.sequences)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        scheduler.start()
        try:
            yield
        finally:
            await scheduler.stop()
            await pool.close()
            database.dispose()

    app = FastAPI(
        title="etude", version=server_version(), description=_ABOUT, lifespan=lifespan, redoc_url=None
    )
    add_error_handlers(app)
    app.include_router(model_routes(models, pool))
    app.include_router(chat_routes(pool, metrics, art.tells_tokens))
    app.include_router(completion_routes(pool, metrics, settings.name))
    app.include_router(file_routes(files))
    app.include_router(job_routes(jobs, files, models, settings.waiting_jobs, scheduler.wake))
    app.include_router(algorithm_routes())
    app.include_router(engine_routes(pool))
    app.include_router(art_routes(settings, pool, models, art, trainings, log))
    app.include_router(preview_routes(pool, models, art, trainings, jobs, log))
    _add_status_routes(app, metrics)
    return Guard(app, settings, metrics)


def _add_status_routes(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/health", tags=["status"], summary="Is the server up")
    def health() -> dict[str, str]:
        """Answers as long as the server does; `/engine/status` tells of its engine."""
        return {"status": "ok"}

    @app.get("/version", tags=["status"], summary="Which etude this is")
    def version() -> dict[str, str]:
        """The server's version."""
        return {"version": server_version()}

    @app.get("/metrics", tags=["status"], summary="Metrics for Prometheus", response_class=Response)
    def prometheus() -> Response:
        """Requests, tokens, queue and jobs, in Prometheus's text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
