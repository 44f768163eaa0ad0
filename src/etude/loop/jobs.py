"""The names of training jobs."""

from __future__ import annotations

from etude.core.trajectory import TrajectoryCollection


def job_name(run_id: str, epoch: int, attempt: int, target: str | None = None, job: int = 1) -> str:
    """The idempotency key of the `job`-th job of an epoch (from 0): another for each target and attempt.

    That of the first epoch of `run` is `run-epoch-1`.
    """
    whose = "" if target is None else f".{target}"
    which = "" if job == 1 else f"-job-{job}"
    return f"{run_id}-epoch-{epoch + 1}{whose}{which}" + (f"-retry-{attempt}" if attempt else "")


def renamed(collection: TrajectoryCollection, name: str) -> TrajectoryCollection:
    """The collection under the job's name, whatever the builder called it."""
    return collection if collection.run_id == name else collection.model_copy(update={"run_id": name})
