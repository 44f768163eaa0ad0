"""The server extension for ART: the routes that ART's client `ServerlessBackend` calls.

The client is `art.ServerlessBackend(api_key=…, base_url="http://this-server/v1")`, in openpipe-art 0.5.17.
A model's id is its name, and a training is a job with the method `grpo`.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, model_validator
from starlette.concurrency import run_in_threadpool

from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.keys import content_hash
from etude.core.training_rows import GrpoRow
from etude.integrations.art.serving_models import ArtModels, ArtNames, to_training_rows
from etude.integrations.art.wire import ArtGroup
from etude.models.text_codec import TextCodec
from etude.server.database import Order, Row, list_object
from etude.server.extensions import ServerParts
from etude.server.guard import JsonRoute
from etude.server.hyperparameters import (
    Hyperparameters,
    Positive,
    hyperparameters_for,
    resolve_hyperparameters,
)
from etude.wire.http_server import ApiError
from etude.wire.models import OWNER
from etude.wire.sampling import validated

_MOST_VALUES = 20_000_000
"""The maximum number of JSON values in a body of trajectories. A token with its logprob has about ten."""
_CISPO_HIGH, _PPO_EPSILON = 4.0, 0.2
"""ART's `epsilon_high` without `ppo`, and its `epsilon` with it."""

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
"""The name of a model. `@` and `:` have a meaning in names, so they are not allowed here."""
Limit: TypeAlias = Annotated[int, Query(ge=1, le=1000)]


class TrainingOptions(BaseModel, extra="forbid", frozen=True):
    """ART's `ExperimentalTrainingConfig`. Unsupported options are refused by name."""

    learning_rate: Positive = 5e-6
    epsilon: Positive | None = None
    epsilon_high: Positive | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    ppo: bool | None = None
    scale_rewards: bool = True

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_off(cls, data: Any) -> Any:
        """Drop options that nobody set: clients send them as null, false or 0."""
        if not isinstance(data, dict):
            return data or {}
        return {
            name: value
            for name, value in data.items()
            if value or (value is not None and name in cls.model_fields)
        }

    @model_validator(mode="after")
    def _clips_above(self) -> TrainingOptions:
        if self.ppo is False and self.epsilon is not None and self.epsilon < 1:
            raise ValueError("epsilon: without ppo, weights are only cut above here; leave it out")
        if self.ppo is not False and self.epsilon is not None and self.epsilon >= 1:
            raise ValueError("epsilon: must be less than 1 where ratios are clipped on both sides")
        return self

    def hyperparameters(self) -> Hyperparameters:
        """Return the job's hyperparameters. As in ART, one optimiser step weighs all trajectories equally."""
        low = self.epsilon or (_PPO_EPSILON if self.ppo else None)
        given: dict[str, Any] = {"clip_low": low, "clip_high": self.epsilon_high or low}
        if self.ppo is False:
            given = {"surrogate": "cispo", "clip_high": self.epsilon_high or _CISPO_HIGH}
        return hyperparameters_for(
            "grpo",
            learning_rate=self.learning_rate,
            reference="base",
            aggregation="sequence",
            ratio=self.importance_sampling_level,
            advantage_scale=None if self.scale_rewards else "none",
            **given,
        )


class ModelBody(BaseModel):
    """The body of `POST /v1/preview/models`."""

    entity: Name | None = None
    project: Name
    name: Name
    base_model: str = Field(min_length=1)
    return_existing: bool = False


class TrainBody(BaseModel):
    """The body of `POST /v1/preview/training-jobs`."""

    model_id: str
    trajectory_groups: list[ArtGroup]
    experimental_config: TrainingOptions = TrainingOptions()

    @classmethod
    def parsed(cls, body: bytes) -> TrainBody:
        """Parse a body, which can be too large to parse on the event loop. Raises RequestError."""
        try:
            data = read_json(body, most_values=_MOST_VALUES)
        except ValueError as error:
            raise RequestError(f"the request is not JSON: {error}") from error
        return validated(cls, data)


class StepsBody(BaseModel):
    """The body of `DELETE /v1/preview/models/{id}/checkpoints`."""

    steps: list[Annotated[int, Field(ge=0)]]


class ArtTrainings:
    """The jobs for ART's training requests. A step is in the database before its job is created."""

    def __init__(self, server: ServerParts, art: ArtModels) -> None:
        self._server = server
        self._art = art
        self._beginning = asyncio.Lock()

    async def submit(self, content: bytes) -> str:
        """Start the next step. Return its job's id, or its name if nothing is to learn.

        Raises ApiError and RequestError.
        """
        body = await run_in_threadpool(TrainBody.parsed, content)
        await run_in_threadpool(self._art.steps, body.model_id)
        rows, counts = await run_in_threadpool(lambda: to_training_rows(body.trajectory_groups, self._speech))
        async with self._beginning:
            if not rows:
                step = await run_in_threadpool(self._art.skip, body.model_id)
                logging.getLogger("etude.server").warning(
                    "%s: nothing to learn from: in every group all rewards are the same", step.name
                )
                return step.name
            job = await run_in_threadpool(self._begin, body, rows, counts)
        self._server.wake()
        return job

    @cached_property
    def _speech(self) -> TextCodec:
        """The tokenizer and template, which all models of the server share."""
        return TextCodec.load(self._server.settings.model)

    def _begin(self, body: TrainBody, rows: Sequence[GrpoRow], counts: Mapping[str, int]) -> str:
        """Return the next step's job: a new one, or the running one if it trains on the same data."""
        server, name, asked = self._server, body.model_id, body.experimental_config.hyperparameters()
        lines = "".join(row.model_dump_json(exclude_none=True) + "\n" for row in rows)
        request_hash = content_hash([lines, asked.model_dump(mode="json")])
        newest, job, is_new = self._art.begin(name, request_hash)
        if not is_new:
            return job
        server.jobs.require_queue_space()
        start, step = server.models.get(newest.served), str(newest.step + 1)
        values = resolve_hyperparameters(
            "grpo", asked, len(rows), start.lora, fine_tuned=start.folder is not None
        )
        file = server.files.upload(f"{name}-{step}.jsonl", io.BytesIO(lines.encode()))
        found = {key: str(count) for key, count in counts.items()}
        server.jobs.create(
            {
                "id": job,
                "model": start.name,
                "method": "grpo",
                "training_file": file["id"],
                "validation_file": None,
                "seed": secrets.randbits(31),
                "suffix": re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64],
                "hyperparameters": values,
                "idempotency_key": None,
                "request_hash": request_hash,
                "metadata": {"art_model": name, "art_step": step} | found,
            }
        )
        return job

    def events(self, job: str) -> list[Row]:
        """Return a job's events so far. A step without a job has trained nothing. Raises ApiError 404."""
        model, _, step = job.partition("@")
        if step and any(known.name == job for known in self._art.steps(model)):
            return [_event("training_started", num_sequences=0), _event("training_ended")]
        row = self._server.jobs.get(job)
        rows, _ = self._server.jobs.events(job, None, 1000)
        steps = sorted(
            (each["data"] for each in rows if each["type"] == "metrics"), key=lambda one: one["step"]
        )
        events = [_event("training_started", num_sequences=int(steps[0]["total_steps"]))] if steps else []
        for number, metrics in enumerate(steps, start=1):
            data = {
                name: float(value)
                for name, value in metrics.items()
                if name not in ("step", "total_steps", "epoch")
                if isinstance(value, int | float) and math.isfinite(value)
            }
            events.append({"id": f"gradient_step-{number}", "type": "gradient_step", "data": data})
        if row["status"] == "succeeded":
            events.append(_event("training_ended"))
        elif row["status"] in ("failed", "cancelled"):
            reason = row["error"]["message"] if row["error"] else "the job was cancelled"
            events.append(_event("training_failed", error_message=reason))
        return events


def art_routes(server: ServerParts, art: ArtModels) -> APIRouter:
    """Return the routes for models, their checkpoints, and training jobs with their events."""
    router = APIRouter(prefix="/v1/preview", tags=["ART"], route_class=JsonRoute)
    _add_model_routes(router, server, art)
    trainings = ArtTrainings(server, art)
    properties: dict[str, Any] = {name: {} for name in TrainBody.model_fields}
    schema = {"type": "object", "required": ["model_id", "trajectory_groups"], "properties": properties}
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    @router.post("/training-jobs", summary="Train a model on trajectories", openapi_extra=body)
    async def create_training_job(request: Request) -> dict[str, str]:
        """Create a `grpo` job. As in ART, the step rises even if there is nothing to learn."""
        return {"id": await trainings.submit(await request.body())}

    @router.get("/training-jobs/{job}/events", summary="What a training job has done")
    def list_training_events(job: str, after: str | None = None, limit: Limit = 1000) -> dict[str, Any]:
        """List events, oldest first. `training_ended` follows once the step exists."""
        return _page(trainings.events(job), after, limit)

    return router


def _add_model_routes(router: APIRouter, server: ServerParts, art: ArtModels) -> None:
    registering = asyncio.Lock()

    @router.post("/models", summary="Register a model")
    async def create_model(body: ModelBody) -> dict[str, Any]:
        """Create the model at step 0, or return the existing one."""
        async with registering:
            if not body.return_existing and art.tells_tokens(body.name):
                raise ApiError(409, f"there is a model '{body.name}' already", param="name")
            await run_in_threadpool(art.register, body.name, body.project, body.base_model)
        facts = body.model_dump(include={"project", "name", "base_model"})
        return {"id": body.name, "entity": body.entity or OWNER, "run_id": None, **facts}

    @router.delete("/models/{name}", summary="Delete a model and its steps")
    async def delete_model(name: str) -> None:
        """Delete the model, but keep weights that other models were made from."""
        await delete_served(await run_in_threadpool(art.delete, name))

    @router.get("/models/{name}/checkpoints", summary="List a model's steps")
    def list_checkpoints(
        name: str, after: str | None = None, limit: Limit = 100, order: Order = "desc"
    ) -> dict[str, Any]:
        """List the steps in pages, newest first by default."""
        rows: list[Row] = [{"id": step.name, "step": step.step, "metrics": {}} for step in art.steps(name)]
        return _page(rows[::-1] if order == "desc" else rows, after, limit)

    @router.delete("/models/{name}/checkpoints", summary="Delete steps")
    async def delete_checkpoints(name: str, body: StepsBody) -> dict[str, Any]:
        """Delete steps by their numbers. The newest step cannot be deleted."""
        steps, unwanted = {step.step for step in await run_in_threadpool(art.steps, name)}, set(body.steps)
        if max(steps) in unwanted:
            raise ApiError(400, f"step {max(steps)} is the newest, and stays", param="steps")
        await delete_served(await run_in_threadpool(art.drop, name, unwanted))
        return {"deleted_count": len(steps & unwanted), "not_found_steps": sorted(unwanted - steps)}

    async def delete_served(names: list[str]) -> None:
        for each in names:
            for deleted in await run_in_threadpool(server.models.delete_with_checkpoints, each):
                await server.pool.forget(deleted)


def _page(rows: list[Row], after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of rows: the rows after the id `after`, or the first rows."""
    ids = [row["id"] for row in rows]
    start = ids.index(after) + 1 if after in ids else 0
    return list_object((rows[start : start + limit], len(rows) > start + limit), dict)


def _event(kind: str, **data: Any) -> Row:
    return {"id": kind, "type": kind, "data": data}


class ArtExtension:
    """The server extension for clients of ART 0.5."""

    large_paths = frozenset({"/v1/preview/training-jobs"})
    names = ArtNames()

    def __init__(self) -> None:
        self._models: ArtModels | None = None

    def routes(self, parts: ServerParts) -> Sequence[APIRouter]:
        """Return the routes that ART's `ServerlessBackend` calls."""
        self._models = ArtModels(parts.database, parts.models, parts.settings.model)
        return [art_routes(parts, self._models)]

    def tells_tokens(self, name: str) -> bool:
        """Return whether a name is ART's. Its clients need token ids and logprobs without asking for them."""
        return self._models is not None and self._models.tells_tokens(name)
