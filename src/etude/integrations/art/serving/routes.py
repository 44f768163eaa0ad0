"""The routes of ART's training server. Its clients, up to 0.5.17, know no other paths."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from etude.integrations.art.serving.bodies import ArtModel, KeepBody, LogBody, TrainBody, described, parsed
from etude.integrations.art.serving.log import ArtLog
from etude.integrations.art.serving.models import ArtModels
from etude.integrations.art.serving.options import ServerConfig
from etude.integrations.art.serving.told_route import ToldRoute
from etude.integrations.art.serving.trainings import ArtTrainings
from etude.server.engines import EnginePool
from etude.server.models import ModelStore
from etude.server.settings import ServerSettings

_NO_KEY = "default"
"""The key that ART tells where there is none."""

Share = Annotated[float, Query(gt=0, le=1)]


def art_routes(
    settings: ServerSettings,
    pool: EnginePool,
    models: ModelStore,
    art: ArtModels,
    trainings: ArtTrainings,
    log: ArtLog,
) -> APIRouter:
    """Register, train, log and delete, for ART's clients."""
    router = APIRouter(tags=["ART"], route_class=ToldRoute)
    _add_model_routes(router, settings, pool, art)
    _add_training_routes(router, art, trainings, log)
    _add_deleting_routes(router, pool, models, art, log)
    return router


def _add_model_routes(router: APIRouter, settings: ServerSettings, pool: EnginePool, art: ArtModels) -> None:
    @router.get("/healthcheck", summary="Is the server up")
    def healthcheck() -> dict[str, str]:
        """As `/health`."""
        return {"status": "ok"}

    registering = asyncio.Lock()

    @router.post("/register", summary="Register a model")
    async def register(model: ArtModel) -> None:
        """Models that are trained begin at step 0; of others there is nothing to know."""
        async with registering:
            if model.trainable:
                await run_in_threadpool(art.register, model)

    @router.post("/_prepare_backend_for_training", summary="Have a model ready")
    async def prepare(
        request: Request, model: ArtModel, config: Annotated[ServerConfig | None, Body()] = None
    ) -> tuple[str, str]:
        """Where the model is served, by its name, and with which key; its newest step is then in memory."""
        newest = await run_in_threadpool(art.newest, model)
        async with pool.using(newest.served, 0):
            pass
        key = _NO_KEY if settings.api_key is None else settings.api_key.get_secret_value()
        return f"{str(request.base_url).rstrip('/')}/v1", key

    @router.post("/_get_step", summary="How often a model was trained")
    def get_step(model: ArtModel) -> int:
        """Its newest step."""
        return art.newest(model).step if model.trainable else 0

    @router.post("/close", summary="Say goodbye")
    def close() -> None:
        """Nothing of the server belongs to one client."""


def _add_training_routes(router: APIRouter, art: ArtModels, trainings: ArtTrainings, log: ArtLog) -> None:
    @router.post("/_train_model", summary="Train a model on trajectories", openapi_extra=described(TrainBody))
    async def train_model(request: Request) -> Response:
        """A line of metrics for each optimiser step; the end of the lines says that the step is there.

        Whoever hangs up cancels the job.
        """
        return await trainings.train(request)

    @router.post("/_log", summary="Keep trajectories", openapi_extra=described(LogBody))
    async def log_trajectories(request: Request) -> None:
        """Those of a split, at the model's step (0.4)."""
        body = await run_in_threadpool(parsed, LogBody, await request.body())
        step = (await run_in_threadpool(art.newest, body.model)).step if body.model.trainable else 0
        await run_in_threadpool(log.write, body.model.name, body.split, step, body.trajectory_groups)


def _add_deleting_routes(
    router: APIRouter, pool: EnginePool, models: ModelStore, art: ArtModels, log: ArtLog
) -> None:
    async def keep(model: ArtModel, steps: set[int]) -> None:
        await delete_served(pool, models, await run_in_threadpool(art.keep, model, steps))

    @router.post("/_delete_checkpoint_files", summary="Delete steps")
    async def delete_checkpoint_files(body: KeepBody) -> None:
        """All but those that are named, and the newest (0.5)."""
        await keep(body.model, set(body.steps_to_keep))

    @router.post("/_delete_checkpoints", summary="Delete all but the best step")
    async def delete_checkpoints(
        model: ArtModel, benchmark: str = "val/reward", benchmark_smoothing: Share = 1.0
    ) -> None:
        """All but the newest, and the one where the metric was highest (0.4)."""
        best = await run_in_threadpool(log.best_step, model.name, benchmark, benchmark_smoothing)
        await keep(model, set() if best is None else {best})


async def delete_served(pool: EnginePool, models: ModelStore, names: list[str]) -> None:
    """Delete models that jobs made, on disk and in memory."""
    for name in names:
        for gone in await run_in_threadpool(models.delete_with_checkpoints, name):
            await pool.forget(gone)
