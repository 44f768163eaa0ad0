"""Following a training job to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from etude.adapters.trainer_adapter import TrainerAdapter
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a job that came to nothing."""

    late: str
    """Where it was not done in time."""
    failed: str
    taken: str
    """Where another job has its name."""


FOR_RUNS = Advice(
    late="Resume the run to try again; a job that needs longer needs a larger 'job_timeout' in the trainer's "
    "config.",
    failed="Nothing that was collected is lost; resume the run to submit it again.",
    taken="resume the run with its settings as they were then, or start a new one",
)
FOR_GROUPS = Advice(
    late="Make it again to try again; a job that needs longer needs a larger 'timeout' of "
    "wait_for_fine_tune_job.",
    failed="Make it again, of the same data, to try again.",
    taken="give this job another name",
)


async def wait_for(
    adapter: TrainerAdapter, ref: TrainingJobRef, seconds: float, poll_interval: float, advice: Advice
) -> TrainingJobStatus:
    """The final status of a job.

    Raises TrainingError when there is none after `seconds`; the job is cancelled then.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            status = await adapter.wait_until_complete(ref, poll_interval=poll_interval)
    except TimeoutError as error:
        if not limit.expired():
            raise
        await adapter.cancel(ref)
        raise TrainingError(
            f"job {ref.run_id} ({ref.backend}) is not done after {seconds:g} s and was cancelled. "
            f"{advice.late}"
        ) from error
    if not status.status.is_final:
        raise TrainingError(
            f"job {ref.run_id} ({ref.backend}): wait_until_complete came back while it is '{status.status}'"
        )
    return status


def require_completed(ref: TrainingJobRef, status: TrainingJobStatus, advice: Advice) -> None:
    """Raise TrainingError for a job that failed, was cancelled or is not known to the backend."""
    if status.status is TrainingStatusEnum.COMPLETED:
        return
    told = f": {status.message.rstrip('.')}" if status.message else ""
    if not status.status.is_final:
        raise TrainingError(
            f"job {ref.run_id} ({ref.backend}) is not over: it is '{status.status}'; wait for it first"
        )
    raise TrainingError(f"job {ref.run_id} ({ref.backend}) ended as '{status.status}'{told}. {advice.failed}")


def version_of(status: TrainingJobStatus, required: bool, ref: TrainingJobRef) -> ModelVersion | None:
    """The weights that a completed job made.

    None when the backend does not say; raises TrainingError when it promised to (`required`).
    """
    told = (status.metadata or {}).get("model_version")
    if told is not None:
        return ModelVersion.model_validate(told)
    if required:
        raise TrainingError(
            f"job {ref.run_id} ({ref.backend}) is completed, and does not say what weights it made"
        )
    return None
