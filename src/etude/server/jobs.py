"""The training jobs: a database queue, shared by server and workers, and a folder for each job."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from etude.backends.state_folders import StateFolders
from etude.server.database import EVENTS, JOBS, MODELS, Page, Row, fetch_page, fetch_row, new_id
from etude.server.guard import not_found
from etude.store.run_folder import lock_holder
from etude.wire.http_server import ApiError

LIVE = ("queued", "running", "paused")
FINAL = ("succeeded", "failed", "cancelled")

_RETRY_SECONDS = 60
_WAITING_JOBS = 100


class JobFolder:
    """`jobs/<id>` in the data folder: a job's locks, its worker's log, and checkpoints to resume from."""

    def __init__(self, data_dir: Path, job: str) -> None:
        self.path = data_dir / "jobs" / job
        self.log = self.path / "worker.log"
        """The worker's standard output and error."""
        self.checkpoints = StateFolders(self.path, "step-", "checkpoint")

    def holders(self) -> list[int]:
        """Return the pids of the processes that train the job."""
        holders = (lock_holder(path) for path in sorted(self.path.glob("lock*")))
        return [pid for pid in holders if pid is not None]


class JobStore:
    """Jobs with their events and checkpoints. Every change is one transaction."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def create(self, values: Mapping[str, Any]) -> tuple[Row, bool]:
        """Queue a job. Return it and True, or the existing job with the same idempotency key and False."""
        initial = {"status": "queued", "result_files": [], "attempts": 0}
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

    def require_queue_space(self) -> None:
        """Raise ApiError 429 if too many jobs are waiting."""
        if len(self.with_status("queued")) >= _WAITING_JOBS:
            message = "the queue of training jobs is full"
            raise ApiError(429, message, code="queue_full", retry_after=_RETRY_SECONDS)

    def find_by_key(self, key: str | None) -> Row | None:
        """Return the job that was created with an idempotency key."""
        return None if key is None else fetch_row(self._engine, JOBS, JOBS.c.idempotency_key == key)

    def get(self, name: str) -> Row:
        """Return a job. Raises ApiError 404."""
        row = fetch_row(self._engine, JOBS, JOBS.c.id == name)
        if row is None:
            raise not_found("fine-tuning job", name, param="id", code="fine_tune_not_found")
        return row

    def page(self, metadata: Mapping[str, str], after: str | None, limit: int) -> Page:
        """Return a page of jobs that have all of `metadata`."""
        conditions = [JOBS.c.metadata[key].as_string() == value for key, value in metadata.items()]
        return fetch_page(self._engine, JOBS, *conditions, after=after, limit=limit)

    def events(self, job: str, after: str | None, limit: int) -> Page:
        """Return a page of a job's events. Raises ApiError 404."""
        self.get(job)
        return fetch_page(self._engine, EVENTS, EVENTS.c.job == job, after=after, limit=limit)

    def checkpoints(self, job: str, after: str | None, limit: int) -> Page:
        """Return a page of a job's checkpoints. Raises ApiError 404."""
        self.get(job)
        conditions = (MODELS.c.job == job, MODELS.c.step.is_not(None))
        return fetch_page(self._engine, MODELS, *conditions, after=after, limit=limit)

    def with_status(self, *statuses: str) -> list[Row]:
        """Return the jobs with any of the statuses, oldest first."""
        query = sa.select(JOBS).where(JOBS.c.status.in_(statuses)).order_by(JOBS.c.number)
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def require_unused(self, model: str) -> None:
        """Raise ApiError 409 if a job that has not ended needs the model."""
        for job in self.with_status(*LIVE):
            if model == job["model"]:
                message = f"job {job['id']}, which is {job['status']}, needs the model; cancel it first"
                raise ApiError(409, message, param="model", code="model_in_use")

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
        with self._engine.connect() as connection:
            return Counter(connection.execute(sa.select(JOBS.c.status)).scalars())

    def start(self, job: str) -> bool:
        """Move a queued job to running. Return False if the job is no longer queued."""
        return self._move(job, ("queued",), "running", attempts=JOBS.c.attempts + 1)

    def requeue(self, job: str, why: str, attempts: int) -> None:
        """Move a running job back to the queue. It resumes later from its last checkpoint."""
        self._move(job, ("running",), "queued", event=why, level="warn", attempts=attempts)

    def cancel(self, job: str) -> Row:
        """End a job. Raises ApiError: 404 if it is unknown, 400 if it has ended."""
        return self._change_status(job, LIVE, "cancelled", "Fine-tuning job cancelled", finished=time.time())

    def pause(self, job: str) -> Row:
        """Pause a job until `resume`. A paused job stays paused. Raises ApiError as `cancel`."""
        return self._change_status(job, LIVE[:2], "paused", "Fine-tuning job paused")

    def resume(self, job: str) -> Row:
        """Queue a paused job again. Other live jobs stay as they are. Raises ApiError as `cancel`."""
        return self._change_status(job, LIVE[2:], "queued", "Fine-tuning job resumed", attempts=0)

    def _change_status(self, job: str, before: Sequence[str], after: str, event: str, **facts: Any) -> Row:
        is_moved, row = self._move(job, before, after, event=event, **facts), self.get(job)
        if not is_moved and row["status"] in FINAL:
            message = f"job {job} has ended: it is {row['status']}"
            raise ApiError(400, message, param="id", code="job_already_completed")
        return row

    def fail(self, job: str, message: str, code: str, param: str | None = None) -> None:
        """Fail a job that cannot be done."""
        facts = {"error": {"code": code, "message": message, "param": param}, "finished": time.time()}
        event = f"The job failed: {message}"
        self._move(job, LIVE, "failed", event=event, level="error", **facts)

    def succeed(self, job: str, model: Mapping[str, Any], **facts: Any) -> None:
        """Move a running job to succeeded and add its model, in one transaction. Skip it if not running."""
        change = {"fine_tuned_model": model["id"], "finished": time.time(), "status": "succeeded", **facts}
        with self._engine.begin() as connection:
            running = (JOBS.c.id == job) & (JOBS.c.status == "running")
            if connection.execute(sa.update(JOBS).where(running).values(change)).rowcount == 0:
                return
            connection.execute(sa.insert(MODELS).values(model))
            _add_event(connection, job, f"New fine-tuned model created: {model['id']}")
            _add_event(connection, job, "The job has successfully completed")

    def add_event(self, job: str, message: str, **facts: Any) -> None:
        """Add an event with its `level` and `data`. It replaces an earlier one with the same `once`."""
        with self._engine.begin() as connection:
            _add_event(connection, job, message, **facts)

    def set(self, job: str, **facts: Any) -> None:
        """Change columns of a job other than its status."""
        with self._engine.begin() as connection:
            connection.execute(sa.update(JOBS).where(JOBS.c.id == job).values(facts))

    def add_checkpoint(self, job: str, model: Mapping[str, Any], keep: int) -> None:
        """Add a checkpoint that clients can call as a model, and forget all but the job's last `keep`."""
        mine = (MODELS.c.job == job) & MODELS.c.step.is_not(None)
        last = sa.select(MODELS.c.id).where(mine).order_by(MODELS.c.step.desc()).limit(keep)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(MODELS).where(MODELS.c.id == model["id"]))
            connection.execute(sa.insert(MODELS).values(model))
            kept = connection.execute(last).scalars().all()
            connection.execute(sa.delete(MODELS).where(mine & MODELS.c.id.not_in(kept)))

    def _move(
        self,
        job: str,
        before: Sequence[str],
        after: str,
        *,
        event: str | None = None,
        level: str = "info",
        **facts: Any,
    ) -> bool:
        where = (JOBS.c.id == job) & JOBS.c.status.in_(before)
        with self._engine.begin() as connection:
            done = connection.execute(sa.update(JOBS).where(where).values(status=after, **facts))
            if done.rowcount and event is not None:
                _add_event(connection, job, event, level=level)
        return bool(done.rowcount)


def model_name(base: str, suffix: str | None, job: str, step: int | None = None) -> str:
    """Return `ft:<base>:<suffix>:<id>`, followed by `:ckpt-step-<n>` for a checkpoint."""
    root = base.split(":")[1] if base.startswith("ft:") else base
    name = f"ft:{root}:{suffix or ''}:{job.removeprefix('ftjob-')[:12]}"
    return name if step is None else f"{name}:ckpt-step-{step}"


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
