"""Following a training job to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice

from etude.backends.trainer_adapter import TrainerAdapter, pauses
from etude.core.errors import JobStillRunning, TrainingError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum

_LOOKS = 12
"""At a job that was cancelled: for about ten seconds."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a job that came to nothing."""

    late: str
    """Where it was not done in time, and is cancelled."""
    running: str
    """Where it was not done in time, and goes on."""
    failed: str
    taken: str
    """Where another job has its name."""


FOR_RUNS = Advice(
    late="Resume the run to try again; a job that needs longer needs a larger 'job_timeout' in the trainer's "
    "config.",
    running="Resume the run to wait for the same job again; a job that needs longer needs a larger "
    "'job_timeout' in the trainer's config.",
    failed="Nothing that was collected is lost; resume the run to submit it again.",
    taken="resume the run with its settings as they were then, or start a new one",
)
FOR_GROUPS = Advice(
    late="Make it again to try again; a job that needs longer needs a larger 'timeout' of "
    "wait_for_fine_tune_job.",
    running="Wait for it again with wait_for_fine_tune_job, with a larger 'timeout'.",
    failed="Make it again, of the same data, to try again.",
    taken="give this job another name",
)


async def wait_for(
    adapter: TrainerAdapter, ref: TrainingJobRef, seconds: float, poll_interval: float, advice: Advice
) -> TrainingJobStatus:
    """The final status of a job.

    After `seconds` the backend is asked to cancel it. Raises TrainingError when it is cancelled then, and
    JobStillRunning when the backend does not say so.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            status = await adapter.wait_until_complete(ref, poll_interval=poll_interval)
    except TimeoutError as error:
        if not limit.expired():
            raise
        return await _cancel(adapter, ref, seconds, advice, error)
    if not status.status.is_final:
        raise TrainingError(
            f"job {ref.run_id} ({ref.backend}): wait_until_complete came back while it is '{status.status}'"
        )
    return status


async def _cancel(
    adapter: TrainerAdapter, ref: TrainingJobRef, seconds: float, advice: Advice, cause: TimeoutError
) -> TrainingJobStatus:
    """Ask the backend to cancel a job, and believe what it then says of it."""
    await adapter.cancel(ref)
    status = await adapter.status(ref)
    for pause in islice(pauses(1.0, 1.0), _LOOKS):
        if status.status.is_final or type(adapter).cancel is TrainerAdapter.cancel:
            break
        await asyncio.sleep(pause)
        status = await adapter.status(ref)
    late = f"job {ref.run_id} ({ref.backend}) is not done after {seconds:g} s"
    if status.status is TrainingStatusEnum.COMPLETED:
        return status
    if status.status.is_final:
        raise TrainingError(f"{late} and was cancelled. {advice.late}") from cause
    raise JobStillRunning(
        f"{late}. Its backend was asked to cancel it and says that it is '{status.status}'. {advice.running}"
    ) from cause


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
