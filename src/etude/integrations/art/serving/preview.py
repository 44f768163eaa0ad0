"""The routes that ART's `ServerlessBackend` asks: the client that releases from 0.5 on have.

`art.ServerlessBackend(api_key=…, base_url="http://this-server/v1")`. A model's id is its name.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from etude.integrations.art.serving.bodies import (
    ArtModel,
    PreviewLogBody,
    PreviewModelBody,
    PreviewStepsBody,
    PreviewTrainBody,
    TrainBody,
    described,
    parsed,
)
from etude.integrations.art.serving.lines import line_of, steps_of_job
from etude.integrations.art.serving.log import ArtLog
from etude.integrations.art.serving.models import ArtModels
from etude.integrations.art.serving.options import DevConfig, TrainConfig
from etude.integrations.art.serving.routes import delete_served
from etude.integrations.art.serving.told_route import ToldRoute
from etude.integrations.art.serving.trainings import ArtTrainings
from etude.server.database import Order, Row, list_object
from etude.server.engines import EnginePool
from etude.server.errors import ApiError, problems_of
from etude.server.jobs import JobStore
from etude.server.models import OWNER, ModelStore

Limit = Annotated[int, Query(ge=1, le=1000)]


def preview_routes(
    pool: EnginePool,
    models: ModelStore,
    art: ArtModels,
    trainings: ArtTrainings,
    jobs: JobStore,
    log: ArtLog,
) -> APIRouter:
    """Models, their checkpoints, and training jobs with their events."""
    router = APIRouter(prefix="/v1/preview", tags=["ART"], route_class=ToldRoute)
    _add_model_routes(router, pool, models, art, log)
    _add_checkpoint_routes(router, pool, models, art)

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
        events = _events_of(job, jobs, art)
        ids = [event["id"] for event in events]
        start = ids.index(after) + 1 if after in ids else 0
        return list_object(events[start : start + limit], len(events) > start + limit)

    return router


def _add_model_routes(
    router: APIRouter, pool: EnginePool, models: ModelStore, art: ArtModels, log: ArtLog
) -> None:
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
        await delete_served(pool, models, await run_in_threadpool(art.delete, model))

    @router.post("/models/{name}/log", summary="Keep trajectories", openapi_extra=described(PreviewLogBody))
    async def log_trajectories(name: str, request: Request) -> None:
        """Those of a split, at the model's step."""
        body = await run_in_threadpool(parsed, PreviewLogBody, await request.body())
        newest = await run_in_threadpool(art.newest, await run_in_threadpool(art.named, name))
        await run_in_threadpool(log.write, name, body.split, newest.step, body.trajectory_groups)


def _add_checkpoint_routes(router: APIRouter, pool: EnginePool, models: ModelStore, art: ArtModels) -> None:
    @router.get("/models/{name}/checkpoints", summary="List a model's steps")
    def list_checkpoints(
        name: str, after: str | None = None, limit: Limit = 100, order: Order = "desc"
    ) -> dict[str, Any]:
        """The newest first, in pages."""
        found = art.steps(art.named(name).name)
        rows: list[Row] = [{"id": one.name, "step": one.step, "metrics": {}} for one in found]
        rows = rows[::-1] if order == "desc" else rows
        ids = [row["id"] for row in rows]
        start = ids.index(after) + 1 if after in ids else 0
        return list_object(rows[start : start + limit], len(rows) > start + limit)

    @router.delete("/models/{name}/checkpoints", summary="Delete steps")
    async def delete_checkpoints(name: str, body: PreviewStepsBody) -> dict[str, Any]:
        """Steps by their numbers; the newest one stays."""
        model = await run_in_threadpool(art.named, name)
        there = {one.step for one in await run_in_threadpool(art.steps, name)}
        if max(there) in body.steps:
            raise ApiError(400, f"step {max(there)} is the newest, and stays", param="steps")
        await delete_served(pool, models, await run_in_threadpool(art.keep, model, there - set(body.steps)))
        unknown = sorted(set(body.steps) - there)
        return {"deleted_count": len(there & set(body.steps)), "not_found_steps": unknown}


def _train_body(model: ArtModel, body: PreviewTrainBody) -> TrainBody:
    """The request as `art run` would have it. Raises ApiError for a wrong option."""
    given = {key: value for key, value in (body.experimental_config or {}).items() if value is not None}
    rate = {"learning_rate": given.pop("learning_rate")} if "learning_rate" in given else {}
    try:
        config, dev = TrainConfig.model_validate(rate), DevConfig.model_validate(given)
    except ValidationError as error:
        told, param = problems_of(error.errors(include_url=False, include_input=False))
        raise ApiError(400, f"experimental_config.{told}", param=param, code="invalid_value") from error
    return TrainBody(model=model, trajectory_groups=body.trajectory_groups, config=config, dev_config=dev)


def _events_of(job: str, jobs: JobStore, art: ArtModels) -> list[Row]:
    """The events of a job so far; a step without a job has had nothing to do."""
    if any(one.name == job for one in art.steps(job.partition("@")[0])):
        return [_event("training_started", num_sequences=0), _event("training_ended")]
    row = jobs.get(job)
    steps = steps_of_job(jobs, job)
    events = [_event("training_started", num_sequences=int(steps[0]["total_steps"]))] if steps else []
    for number, step in enumerate(steps, start=1):
        line = line_of(step, 0, {})
        told = {name: value for name, value in line.items() if "num_gradient_steps" not in name}
        events.append({"id": f"gradient_step-{number}", "type": "gradient_step", "data": told})
    if row["status"] == "succeeded":
        events.append(_event("training_ended"))
    elif row["status"] in ("failed", "cancelled"):
        why = row["error"]["message"] if row["error"] else "the job was cancelled"
        events.append(_event("training_failed", error_message=why))
    return events


def _event(kind: str, **data: Any) -> Row:
    return {"id": kind, "type": kind, "data": data}
