"""How a job at OpenAI's API stands, in the words of every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from etude.core.job import ModelVersion, TrainingStatusEnum
from etude.core.keys import content_hash

if TYPE_CHECKING:
    from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

STATES = {
    "validating_files": TrainingStatusEnum.PENDING,
    "queued": TrainingStatusEnum.PENDING,
    "paused": TrainingStatusEnum.PENDING,
    "running": TrainingStatusEnum.RUNNING,
    "succeeded": TrainingStatusEnum.COMPLETED,
    "failed": TrainingStatusEnum.FAILED,
    "cancelled": TrainingStatusEnum.CANCELED,
}


def hosted_version(number: int, job_id: str, model: str) -> ModelVersion:
    """The version that is a model at an API, made by the job."""
    # The API gives no hash of the weights; the job and the model's name stand for them.
    return ModelVersion(number=number, location=model, digest=content_hash([job_id, model]))


def error_of(job: FineTuningJob) -> str | None:
    """`Code: c. Message: m. Parameter: p.` of a job that failed; None of others."""
    error = job.error
    if error is None or not (error.code or error.message):
        return None
    text = f"Code: {error.code}. Message: {error.message}."
    return f"{text} Parameter: {error.param}." if error.param else text


def metrics_of(events: Sequence[FineTuningJobEvent]) -> dict[str, float]:
    """The numbers in the latest of the events; the events are oldest first."""
    for event in reversed(events):
        if isinstance(event.data, Mapping) and event.type == "metrics":
            numbers = {str(key): value for key, value in event.data.items()}
            return {key: value for key, value in numbers.items() if type(value) in (int, float)}
    return {}
