"""`/v1/fine_tuning/jobs`: job requests, and jobs as the API presents them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field, GetJsonSchemaHandler, PrivateAttr, field_validator, model_validator
from pydantic_core import CoreSchema

from etude.algorithms.algorithm import algorithm_type, data_kind
from etude.core.keys import content_hash
from etude.core.training_rows import ROW_OF
from etude.core.trajectory import Method
from etude.server.database import Row, list_object
from etude.server.files import FileStore
from etude.server.hyperparameters import (
    Hyperparameters,
    method_model,
    resolve_hyperparameters,
    server_algorithms,
)
from etude.server.jobs import JobStore
from etude.server.models import ModelStore
from etude.wire.http_server import ApiError

_Key = Annotated[str, Field(min_length=1, max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

Limit = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(max_length=255)]


class MethodBody(BaseModel, extra="allow"):
    """`method`: its type, which is an algorithm, and the hyperparameters under the type's name."""

    type: Method

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: Method) -> Method:
        known = server_algorithms()
        if name not in known:
            raise ValueError(
                f"there is no algorithm '{name}' here. Allowed: {', '.join(known)}; to add your own, "
                "start the server with --algorithms module:Name"
            )
        return name

    @model_validator(mode="after")
    def _only_its_own(self) -> MethodBody:
        given = self.model_extra or {}
        if wrong := sorted(given.keys() - {self.type}):
            raise ValueError(f"the method is {self.type}, but there are options for {', '.join(wrong)}")
        if self.type in given:
            body = method_model(algorithm_type(self.type)).model_validate({self.type: given[self.type] or {}})
            self._asked = getattr(body, self.type).hyperparameters
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add each algorithm's own hyperparameters under its name."""
        shown = handler.resolve_ref_schema(handler(schema))
        known = [*server_algorithms()]
        shown["properties"]["type"]["enum"] = known
        shown["additionalProperties"] = False
        for method in known:
            options = handler(method_model(algorithm_type(method)).__pydantic_core_schema__)
            shown["properties"] |= handler.resolve_ref_schema(options)["properties"]
        return shown

    _asked: Hyperparameters = PrivateAttr(default_factory=Hyperparameters)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The hyperparameters that the request gives."""
        return self._asked


class JobBody(BaseModel, extra="forbid"):
    """The body of a job request: model, data and method."""

    model: str = Field(min_length=1)
    training_file: str = Field(min_length=1)
    validation_file: str | None = None
    method: MethodBody = Field(default_factory=lambda: MethodBody(type="supervised"))
    suffix: str | None = Field(default=None, description="Part of the new model's name.")
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)
    integrations: list[Literal["none"]] | None = Field(default=None, max_length=0)

    @field_validator("suffix")
    @classmethod
    def _names_a_model(cls, suffix: str | None) -> str | None:
        if suffix and not _SUFFIX.fullmatch(suffix):
            raise ValueError("give 1 to 64 letters, digits, '-' and '_', and begin with a letter or a digit")
        return suffix or None

    def hash(self) -> str:
        """Hash everything that defines the job."""
        return content_hash(self.model_dump(mode="json", exclude_none=True))


_JOB_FIELDS = (
    "id",
    "status",
    "model",
    "fine_tuned_model",
    "training_file",
    "validation_file",
    "suffix",
    "seed",
    "metadata",
    "error",
    "trained_tokens",
)


def job_object(row: Row) -> dict[str, Any]:
    """Return the `fine_tuning.job` object."""
    method, values = row["method"], row["hyperparameters"]
    return {
        **{name: row[name] for name in _JOB_FIELDS},
        "object": "fine_tuning.job",
        "created_at": int(row["created"]),
        "finished_at": None if row["finished"] is None else int(row["finished"]),
        "method": {"type": method, method: {"hyperparameters": values}},
        "hyperparameters": {
            name: values[name] for name in ("n_epochs", "batch_size", "learning_rate_multiplier")
        },
        "organization_id": "etude",
        "integrations": [],
        "result_files": [],
    }


def event_object(row: Row) -> dict[str, Any]:
    """Return the `fine_tuning.job.event` object."""
    return {
        **{name: row[name] for name in ("id", "level", "type", "message")},
        "object": "fine_tuning.job.event",
        "created_at": int(row["created"]),
        "data": row["data"] or {},
    }


def job_routes(jobs: JobStore, files: FileStore, models: ModelStore, wake: Callable[[], None]) -> APIRouter:
    """Return the routes for jobs and algorithms. `wake` makes the scheduler look at the queue."""
    router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"])

    @router.post("/jobs", summary="Train a model")
    def create_job(body: JobBody, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
        """Queue a job. If a job with the same `Idempotency-Key` exists, return that one."""
        row, is_new = jobs.find_by_key(idempotency_key), False
        if row is None:
            values = _values(files, models, body)
            jobs.require_queue_space()
            row, is_new = jobs.create(
                values | {"idempotency_key": idempotency_key, "request_hash": body.hash()}
            )
        if is_new:
            wake()
        elif row["request_hash"] != body.hash():
            message = f"the idempotency key belongs to job {row['id']}, which was created by another request"
            raise ApiError(409, message, code="idempotency_key_reused")
        return job_object(row)

    @router.get("/jobs", summary="List jobs")
    def list_jobs(request: Request, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        """List the newest jobs first. `metadata[key]=value` selects the jobs with that value."""
        query = request.query_params.multi_items()
        wanted = {key[9:-1]: value for key, value in query if key.startswith("metadata[") and key[-1] == "]"}
        if any('"' in key for key in wanted):
            raise ApiError(400, 'a metadata key cannot contain a "', param="metadata", code="invalid_value")
        return list_object(jobs.page(wanted, after, limit), job_object)

    @router.get("/jobs/{job_id}", summary="Retrieve a job")
    def retrieve_job(job_id: str) -> dict[str, Any]:
        return job_object(jobs.get(job_id))

    @router.post("/jobs/{job_id}/cancel", summary="Cancel a job")
    def cancel_job(job_id: str) -> dict[str, Any]:
        """End a waiting or running job. It makes no model."""
        return job_object(jobs.cancel(job_id))

    @router.get("/jobs/{job_id}/events", summary="List a job's events")
    def list_events(job_id: str, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        """List the newest events first. Events of type `metrics` describe a step."""
        return list_object(jobs.events(job_id, after, limit), event_object)

    @router.get("/algorithms", summary="List algorithms")
    def list_algorithms() -> dict[str, Any]:
        """List the values for `type` in a job's `method`."""
        return {"object": "list", "data": sorted(server_algorithms())}

    return router


def _values(files: FileStore, models: ModelStore, body: JobBody) -> dict[str, Any]:
    """Return the columns of a new job. Raises ApiError if its parts do not fit together."""
    method = body.method.type
    model = models.get(body.model)
    training = _file(files, body.training_file, method, "training_file")
    if body.validation_file is not None:
        _file(files, body.validation_file, method, "validation_file")
    rows, is_fine_tuned = training["rows"], model.folder is not None
    try:
        values = resolve_hyperparameters(
            method, body.method.hyperparameters, rows, model.lora, fine_tuned=is_fine_tuned
        )
    except ValueError as error:
        param = f"method.{method}.hyperparameters.lora_rank"
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
    return {
        **body.model_dump(include={"model", "training_file", "validation_file", "suffix"}),
        "method": method,
        "seed": secrets.randbits(31) if body.seed is None else body.seed,
        "hyperparameters": values,
        "metadata": body.metadata or {},
    }


def _file(files: FileStore, name: str, method: Method, param: str) -> Row:
    try:
        row = files.get(name)
    except ApiError as error:
        raise ApiError(400, f"there is no file {name!r}", param=param, code="invalid_value") from error
    if row["method"] != ROW_OF[data_kind(method)]:
        message = f"file {name} has rows for {row['method']}, but the method is {method}"
        raise ApiError(400, message, param=param, code="invalid_training_file")
    return row
