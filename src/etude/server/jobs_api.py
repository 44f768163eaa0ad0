"""`/v1/fine_tuning/jobs`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request

from etude.algorithms.algorithm import kind_of
from etude.core.training_rows import ROW_OF
from etude.core.trajectory import Method
from etude.server.errors import ApiError
from etude.server.files import FileStore
from etude.server.hyperparameters import resolved, server_algorithms
from etude.server.job_objects import checkpoint_object, event_object, job_object
from etude.server.job_request import JobBody
from etude.server.jobs import JobStore, require_same
from etude.server.models import ModelStore
from etude.server.pages import Row, list_object

Limit = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(max_length=255)]


def job_routes(
    jobs: JobStore, files: FileStore, models: ModelStore, waiting_jobs: int, woken: Callable[[], None]
) -> APIRouter:
    """Create, follow and cancel jobs. `woken` tells the scheduler that something changed."""
    router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])

    @router.post("", summary="Train a model")
    def create_job(body: JobBody, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
        """Queue a job. One that was created with the same `Idempotency-Key` is given back instead."""
        key = body.key(idempotency_key)
        known = None if key is None else jobs.of_key(key)
        if known is not None:
            require_same(known, body.differences(known, files.are_same))
            return job_object(known)
        values = _values(body, files, models) | {"idempotency_key": key, "request_hash": body.hash()}
        jobs.require_place(waiting_jobs)
        row, _ = jobs.create(values)
        woken()
        return job_object(row)

    @router.get("", summary="List jobs")
    def list_jobs(request: Request, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        """The newest first; `metadata[key]=value` picks those that have it."""
        query = request.query_params.multi_items()
        wanted = {key[9:-1]: value for key, value in query if key.startswith("metadata[") and key[-1] == "]"}
        if any('"' in key for key in wanted):
            raise ApiError(400, 'a key of metadata cannot have a "', param="metadata", code="invalid_value")
        rows, more = jobs.page(wanted, after, limit)
        return list_object([job_object(row) for row in rows], more)

    @router.get("/{job_id}", summary="Retrieve a job")
    def retrieve_job(job_id: str) -> dict[str, Any]:
        """Where it stands."""
        return job_object(jobs.get(job_id))

    @router.post("/{job_id}/cancel", summary="Cancel a job")
    def cancel_job(job_id: str) -> dict[str, Any]:
        """End a job that waits or trains; it makes no model."""
        row = jobs.cancel(job_id)
        woken()
        return job_object(row)

    @router.get("/{job_id}/events", summary="List a job's events")
    def list_events(job_id: str, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        """The newest first. Events of the type `metrics` tell of a step."""
        rows, more = jobs.events(job_id, after, limit)
        return list_object([event_object(row) for row in rows], more)

    @router.get("/{job_id}/checkpoints", summary="List a job's checkpoints")
    def list_checkpoints(job_id: str, after: str | None = None, limit: Limit = 10) -> dict[str, Any]:
        """The models after the last epochs; each can be asked by its name."""
        rows, more = jobs.checkpoints(job_id, after, limit)
        return list_object([checkpoint_object(row) for row in rows], more)

    return router


def algorithm_routes() -> APIRouter:
    """Which algorithms a job can name."""
    router = APIRouter(prefix="/v1/fine_tuning/algorithms", tags=["fine-tuning"])

    @router.get("", summary="List algorithms")
    def list_algorithms() -> dict[str, Any]:
        """Names for the `type` of a job's `method`."""
        return {"object": "list", "data": sorted(server_algorithms())}

    return router


def _values(body: JobBody, files: FileStore, models: ModelStore) -> dict[str, Any]:
    """The columns of a new job. Raises ApiError for what does not fit together."""
    method = body.method.type
    model = models.get(body.model)
    training = _file(files, body.training_file, method, "training_file")
    if body.validation_file is not None:
        _file(files, body.validation_file, method, "validation_file")
    try:
        values = resolved(
            method, body.asked, training["rows"], model.lora, fine_tuned=model.folder is not None
        )
    except ValueError as error:
        param = f"method.{method}.hyperparameters.lora_rank"
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
    return {
        "model": body.model,
        "method": method,
        "training_file": body.training_file,
        "validation_file": body.validation_file,
        "suffix": body.suffix,
        "seed": secrets.randbits(31) if body.seed is None else body.seed,
        "hyperparameters": values,
        "metadata": body.metadata or {},
    }


def _file(files: FileStore, name: str, method: Method, param: str) -> Row:
    try:
        row = files.get(name)
    except ApiError as error:
        raise ApiError(400, f"there is no file {name!r}", param=param, code="invalid_value") from error
    if row["method"] != ROW_OF[kind_of(method)]:
        raise ApiError(
            400,
            f"file {name} has rows for {row['method']}, and the method is {method}",
            param=param,
            code="invalid_training_file",
        )
    return row
