"""ART as an extension of the server: the routes of its training server, and those of `ServerlessBackend`.

Clients up to 0.5.17 know no other paths than those of the training server. For the other:
`art.ServerlessBackend(api_key=…, base_url="http://this-server/v1")`. A model's id is its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from etude.integrations.art.serving.bodies import (
    ArtLog,
    ArtModel,
    KeepBody,
    LogBody,
    PreviewLogBody,
    PreviewModelBody,
    PreviewStepsBody,
    PreviewTrainBody,
    TrainBody,
    described,
    parsed,
)
from etude.integrations.art.serving.models import ArtModels, ArtNames
from etude.integrations.art.serving.options import DevConfig, ServerConfig, TrainConfig
from etude.integrations.art.serving.trainings import ArtTrainings, line_of, steps_of_job
from etude.server.database import Order, Row, list_object
from etude.server.errors import JsonRoute
from etude.server.extensions import ServerParts
from etude.server.jobs import JobStore
from etude.server.models import OWNER
from etude.wire.http_server import ApiError
from etude.wire.sampling import problems_of

_LOG = logging.getLogger("etude.server")

_NO_KEY = "default"
"""The key that ART gives where there is none."""

Share = Annotated[float, Query(gt=0, le=1)]
Limit = Annotated[int, Query(ge=1, le=1000)]


class LoggedRoute(JsonRoute):
    """Logs why a request was refused: ART's clients show at most its status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, and what it raises in the log."""
        handle = super().get_route_handler()

        async def handle_and_log(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                _LOG.warning("%s: %s", request.url.path, error.detail)
                raise
            except RequestValidationError as error:
                _LOG.warning("%s: %s", request.url.path, problems_of(error.errors())[0])
                raise

        return handle_and_log


def art_routes(server: ServerParts, art: ArtModels, trainings: ArtTrainings, log: ArtLog) -> APIRouter:
    """Register, train, log and delete, for ART's clients."""
    router = APIRouter(tags=["ART"], route_class=LoggedRoute)
    _add_model_routes(router, server, art)
    _add_training_routes(router, art, trainings, log)
    _add_deleting_routes(router, server, art, log)
    return router


def _add_model_routes(router: APIRouter, server: ServerParts, art: ArtModels) -> None:
    @router.get("/healthcheck", summary="Is the server up")
    async def healthcheck() -> dict[str, str]:
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
        async with server.pool.using(newest.served, 0):
            pass
        secret = server.settings.api_key
        key = _NO_KEY if secret is None else secret.get_secret_value()
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


def _add_deleting_routes(router: APIRouter, server: ServerParts, art: ArtModels, log: ArtLog) -> None:
    async def keep(model: ArtModel, steps: set[int]) -> None:
        await _delete_served(server, await run_in_threadpool(art.keep, model, steps))

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


async def _delete_served(server: ServerParts, names: list[str]) -> None:
    """Delete models that jobs made, on disk and in memory."""
    for name in names:
        for deleted in await run_in_threadpool(server.models.delete_with_checkpoints, name):
            await server.pool.forget(deleted)


def preview_routes(server: ServerParts, art: ArtModels, trainings: ArtTrainings, log: ArtLog) -> APIRouter:
    """Models, their checkpoints, and training jobs with their events."""
    router = APIRouter(prefix="/v1/preview", tags=["ART"], route_class=LoggedRoute)
    _add_preview_model_routes(router, server, art, log)
    _add_checkpoint_routes(router, server, art)

    @router.post(
        "/training-jobs", summary="Train a model on trajectories", openapi_extra=described(PreviewTrainBody)
    )
    async def create_training_job(request: Request) -> dict[str, str]:
        """A `grpo` job. Where nothing can be learned, the step goes up all the same, as with ART."""
        body = await run_in_threadpool(parsed, PreviewTrainBody, await request.body())
        model = await run_in_threadpool(art.named, body.model_id)
        given = await trainings.submit(_train_body(model, body))
        return {"id": given.job or given.step}

    @router.get("/training-jobs/{job}/events", summary="What a training job has done")
    def list_training_events(job: str, after: str | None = None, limit: Limit = 1000) -> dict[str, Any]:
        """The oldest first. `training_ended` is told once the step is there."""
        return _page(_events_of(job, server.jobs, art), after, limit)

    return router


def _add_preview_model_routes(router: APIRouter, server: ServerParts, art: ArtModels, log: ArtLog) -> None:
    @router.post("/models", summary="Register a model")
    def create_model(body: PreviewModelBody) -> dict[str, Any]:
        """At step 0, or the one that is there."""
        model = ArtModel(name=body.name, project=body.project, trainable=True, base_model=body.base_model)
        if not body.return_existing and art.tells_tokens(body.name):
            raise ApiError(409, f"there is a model '{body.name}' already", param="name")
        art.register(model)
        facts = body.model_dump(include={"project", "name", "base_model"})
        return {"id": body.name, "entity": body.entity or OWNER, "run_id": None, **facts}

    @router.delete("/models/{name}", summary="Delete a model and its steps")
    async def delete_model(name: str) -> None:
        """All of it, but for what other models were made of."""
        model = await run_in_threadpool(art.named, name)
        await _delete_served(server, await run_in_threadpool(art.delete, model))

    @router.post("/models/{name}/log", summary="Keep trajectories", openapi_extra=described(PreviewLogBody))
    async def log_trajectories(name: str, request: Request) -> None:
        """Those of a split, at the model's step."""
        body = await run_in_threadpool(parsed, PreviewLogBody, await request.body())
        newest = await run_in_threadpool(art.newest, await run_in_threadpool(art.named, name))
        await run_in_threadpool(log.write, name, body.split, newest.step, body.trajectory_groups)


def _add_checkpoint_routes(router: APIRouter, server: ServerParts, art: ArtModels) -> None:
    @router.get("/models/{name}/checkpoints", summary="List a model's steps")
    def list_checkpoints(
        name: str, after: str | None = None, limit: Limit = 100, order: Order = "desc"
    ) -> dict[str, Any]:
        """The newest first, in pages."""
        steps = art.steps(art.named(name).name)
        rows: list[Row] = [{"id": step.name, "step": step.step, "metrics": {}} for step in steps]
        return _page(rows[::-1] if order == "desc" else rows, after, limit)

    @router.delete("/models/{name}/checkpoints", summary="Delete steps")
    async def delete_checkpoints(name: str, body: PreviewStepsBody) -> dict[str, Any]:
        """Steps by their numbers; the newest one stays."""
        model = await run_in_threadpool(art.named, name)
        steps, unwanted = {step.step for step in await run_in_threadpool(art.steps, name)}, set(body.steps)
        if max(steps) in unwanted:
            raise ApiError(400, f"step {max(steps)} is the newest, and stays", param="steps")
        await _delete_served(server, await run_in_threadpool(art.keep, model, steps - unwanted))
        return {"deleted_count": len(steps & unwanted), "not_found_steps": sorted(unwanted - steps)}


def _page(rows: list[Row], after: str | None, limit: int) -> dict[str, Any]:
    """A page of rows: those that follow the id `after`, or the first."""
    ids = [row["id"] for row in rows]
    start = ids.index(after) + 1 if after in ids else 0
    return list_object((rows[start : start + limit], len(rows) > start + limit), dict)


def _train_body(model: ArtModel, body: PreviewTrainBody) -> TrainBody:
    """The request as `art run` would have it. Raises ApiError for a wrong option."""
    given = {key: value for key, value in (body.experimental_config or {}).items() if value is not None}
    rate = {"learning_rate": given.pop("learning_rate")} if "learning_rate" in given else {}
    try:
        config, dev = TrainConfig.model_validate(rate), DevConfig.model_validate(given)
    except ValidationError as error:
        message, param = problems_of(error.errors(include_url=False, include_input=False))
        raise ApiError(400, f"experimental_config.{message}", param=param, code="invalid_value") from error
    return TrainBody(model=model, trajectory_groups=body.trajectory_groups, config=config, dev_config=dev)


def _events_of(job: str, jobs: JobStore, art: ArtModels) -> list[Row]:
    """The events of a job so far; a step without a job has had nothing to do."""
    if any(step.name == job for step in art.steps(job.partition("@")[0])):
        return [_event("training_started", num_sequences=0), _event("training_ended")]
    row = jobs.get(job)
    steps = steps_of_job(jobs, job)
    events = [_event("training_started", num_sequences=int(steps[0]["total_steps"]))] if steps else []
    for number, step in enumerate(steps, start=1):
        line = line_of(step, 0, {})
        data = {name: value for name, value in line.items() if "num_gradient_steps" not in name}
        events.append({"id": f"gradient_step-{number}", "type": "gradient_step", "data": data})
    if row["status"] == "succeeded":
        events.append(_event("training_ended"))
    elif row["status"] in ("failed", "cancelled"):
        reason = row["error"]["message"] if row["error"] else "the job was cancelled"
        events.append(_event("training_failed", error_message=reason))
    return events


def _event(kind: str, **data: Any) -> Row:
    return {"id": kind, "type": kind, "data": data}


class ArtExtension:
    """Serves clients of ART 0.4 and 0.5."""

    open_paths = frozenset({"/healthcheck"})
    large_paths = frozenset({"/_train_model", "/_log", "/v1/preview/training-jobs"})
    names = ArtNames()

    def __init__(self) -> None:
        self._models: ArtModels | None = None

    def routes(self, parts: ServerParts) -> Sequence[APIRouter]:
        """Those of ART's training server, and those that its `ServerlessBackend` asks."""
        self._models = art = ArtModels(parts.database, parts.models, parts.settings.model)
        log = ArtLog(parts.settings.data_dir)
        trainings = ArtTrainings(parts, art, log)
        return [art_routes(parts, art, trainings, log), preview_routes(parts, art, trainings, log)]

    def tells_tokens(self, name: str) -> bool:
        """Whether a name is ART's: its clients learn from tokens and logprobs, and do not ask for them."""
        return self._models is not None and self._models.tells_tokens(name)
