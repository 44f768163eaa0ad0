"""The training jobs: a queue in the database, a folder for each job, and the routes `/v1/fine_tuning`."""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Header, Query, Request
from sqlalchemy.exc import IntegrityError

from etude.algorithms.algorithm import data_kind
from etude.backends.job_training import News
from etude.core.training_rows import ROW_OF
from etude.core.trajectory import Method
from etude.server.database import (
    EVENTS,
    JOBS,
    MODELS,
    Page,
    Row,
    fetch_page,
    fetch_row,
    list_object,
    new_id,
    require_row,
)
from etude.server.files import FileStore
from etude.server.job_request import JobBody, resolve_hyperparameters, server_algorithms
from etude.server.models import ModelStore
from etude.wire.http_server import ApiError

Limit = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(max_length=255)]


class JobStore:
    """Jobs with their events. Every change is one transaction."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def create(self, values: Mapping[str, Any]) -> tuple[Row, bool]:
        """Queue a job. Return it and True, or the existing job with the same idempotency key and False."""
        initial = {"status": "queued", "news_read": 0}
        row = {"id": new_id("ftjob"), "created": time.time(), **initial, **values}
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(JOBS).values(row))
                _add_event(connection, row["id"], f"Created fine-tuning job: {row['id']}", once="created")
                _add_event(
                    connection, row["id"], "Files validated, moving job to queued state", once="queued"
                )
        except IntegrityError:
            if (known := self.find_by_key(values["idempotency_key"])) is None:
                raise
            return known, False
        return self.get(str(row["id"])), True

    def find_by_key(self, key: str | None) -> Row | None:
        """Return the job that was created with an idempotency key."""
        return None if key is None else fetch_row(self._engine, JOBS, JOBS.c.idempotency_key == key)

    def get(self, name: str) -> Row:
        """Return a job. Raises ApiError 404."""
        return require_row(self._engine, JOBS, name, "fine-tuning job", "fine_tune_not_found")

    def page(self, metadata: Mapping[str, str], after: str | None, limit: int) -> Page:
        """Return a page of jobs that have all of `metadata`."""
        conditions = [JOBS.c.metadata[key].as_string() == value for key, value in metadata.items()]
        return fetch_page(self._engine, JOBS, *conditions, after=after, limit=limit)

    def events(self, job: str, after: str | None, limit: int) -> Page:
        """Return a page of a job's events. Raises ApiError 404."""
        self.get(job)
        return fetch_page(self._engine, EVENTS, EVENTS.c.job == job, after=after, limit=limit)

    def with_status(self, status: str) -> list[Row]:
        """Return the jobs with a status, oldest first."""
        query = sa.select(JOBS).where(JOBS.c.status == status).order_by(JOBS.c.number)
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
        with self._engine.connect() as connection:
            return Counter(connection.execute(sa.select(JOBS.c.status)).scalars())

    def start(self, job: str) -> bool:
        """Move a queued job to running. Return False if the job is no longer queued."""
        with self._engine.begin() as connection:
            queued = (JOBS.c.id == job) & (JOBS.c.status == "queued")
            return bool(connection.execute(sa.update(JOBS).where(queued).values(status="running")).rowcount)

    def cancel(self, job: str) -> Row:
        """End a job. Raises ApiError: 404 if it is unknown, 400 if it has ended."""
        is_ended, row = self._end(job, "cancelled", "Fine-tuning job cancelled"), self.get(job)
        if not is_ended:
            message = f"job {job} has ended: it is {row['status']}"
            raise ApiError(400, message, param="id", code="job_already_completed")
        return row

    def fail(self, job: str, message: str, code: str, param: str | None = None) -> None:
        """Fail a job that cannot be done."""
        error = {"code": code, "message": message, "param": param}
        self._end(job, "failed", f"The job failed: {message}", level="error", error=error)

    def succeed(self, job: str, model: Mapping[str, Any], trained_tokens: int) -> None:
        """Move a running job to succeeded and add its model, in one transaction. Skip it if not running."""
        change = {"fine_tuned_model": model["id"], "finished": time.time(), "status": "succeeded"}
        change["trained_tokens"] = trained_tokens
        with self._engine.begin() as connection:
            running = (JOBS.c.id == job) & (JOBS.c.status == "running")
            if connection.execute(sa.update(JOBS).where(running).values(change)).rowcount == 0:
                return
            connection.execute(sa.insert(MODELS).values(model))
            _add_event(connection, job, f"New fine-tuned model created: {model['id']}")
            _add_event(connection, job, "The job has successfully completed")

    def add_news(self, job: str, news: Sequence[News], position: int) -> None:
        """Add the events that a job's processes have told, and the position up to which they were read."""
        with self._engine.begin() as connection:
            for each in news:
                _add_event(connection, job, **_event(each))
            connection.execute(sa.update(JOBS).where(JOBS.c.id == job).values(news_read=position))

    def _end(self, job: str, after: str, event: str, *, level: str = "info", **facts: Any) -> bool:
        live = (JOBS.c.id == job) & JOBS.c.status.in_(("queued", "running"))
        change = {"status": after, "finished": time.time(), **facts}
        with self._engine.begin() as connection:
            done = connection.execute(sa.update(JOBS).where(live).values(change))
            if done.rowcount:
                _add_event(connection, job, event, level=level)
        return bool(done.rowcount)


def model_name(base: str, suffix: str | None, job: str) -> str:
    """Return `ft:<base>:<suffix>:<id>`."""
    root = base.split(":")[1] if base.startswith("ft:") else base
    return f"ft:{root}:{suffix or ''}:{job.removeprefix('ftjob-')[:12]}"


def _event(news: News) -> dict[str, Any]:
    """Return the event for news of a job's processes."""
    step, metrics = news.step, news.metrics
    match news.kind:
        case "started":
            resumed = f", from step {step}" if step else ""
            return {"message": f"Fine-tuning job started{resumed}", "once": f"started {step}"}
        case "went_back":
            message = f"A checkpoint is damaged: {news.message}; the job {news.goes_on}"
            return {"message": message, "level": "warn"}
        case "ended":
            message = f"The worker ended early ({news.message}); the job {news.goes_on}"
            return {"message": message, "level": "warn"}
    message = f"Step {step}/{news.of}: training loss={metrics.get('loss', math.nan):.4f}"
    if "valid_loss" in metrics:
        message += f", validation loss={metrics['valid_loss']:.4f}"
    data = {"step": step, "total_steps": news.of, "epoch": news.epoch, **metrics}
    if "loss" in metrics:
        data["train_loss"] = metrics["loss"]
    return {"message": message, "once": f"step {step}", "data": data}


def _add_event(
    connection: sa.Connection,
    job: str,
    message: str,
    *,
    level: str = "info",
    once: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    if once is not None:
        connection.execute(sa.delete(EVENTS).where((EVENTS.c.job == job) & (EVENTS.c.once == once)))
    connection.execute(
        sa.insert(EVENTS).values(
            id=new_id("ftevent"),
            created=time.time(),
            job=job,
            level=level,
            type="message" if data is None else "metrics",
            message=message,
            data=None if data is None else dict(data),
            once=once,
        )
    )


_REQUESTED = ("model", "training_file", "validation_file", "suffix", "seed", "metadata")
"""The columns that a job's object has under the same names, as it has `_RESULTS`."""
_RESULTS = ("id", "status", "fine_tuned_model", "error", "trained_tokens")


def job_object(row: Row) -> dict[str, Any]:
    """Return the `fine_tuning.job` object."""
    method, values = row["method"], row["hyperparameters"]
    return {
        **{name: row[name] for name in (*_REQUESTED, *_RESULTS)},
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


def job_routes(jobs: JobStore, files: FileStore, models: ModelStore, wake: Callable[[], None]) -> APIRouter:
    """Return the routes for jobs and algorithms. `wake` makes the scheduler look at the queue."""
    router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"])

    @router.post("/jobs", summary="Train a model")
    def create_job(body: JobBody, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
        """Queue a job. If a job with the same `Idempotency-Key` exists, return that one."""
        row, is_new = jobs.find_by_key(idempotency_key), False
        if row is None:
            values = _values(files, models, body)
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
        return list_object(
            jobs.events(job_id, after, limit),
            lambda row: {
                **{name: row[name] for name in ("id", "level", "type", "message")},
                "object": "fine_tuning.job.event",
                "created_at": int(row["created"]),
                "data": row["data"] or {},
            },
        )

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
    start = None if model.folder is None else model
    try:
        values = resolve_hyperparameters(method, body.method.hyperparameters, training["rows"], start)
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
