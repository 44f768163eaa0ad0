"""What goes wrong at a fine-tuning API, as errors of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from etude.core.errors import BackendError, TrainingError

if TYPE_CHECKING:
    from openai import APIError
    from openai.types.fine_tuning import FineTuningJob


class TrainingJobNotFoundClientError(TrainingError):
    """There is no such job: none was created, or the backend does not know it."""

    def __init__(self, job_id: str | None) -> None:
        told = "no job was created yet" if job_id is None else f"the backend knows no job {job_id}"
        super().__init__(f"training job not found: {told}")
        self.job_id = job_id


@contextmanager
def api_errors(where: str, key: str) -> Iterator[None]:
    """What the SDK raises, as a BackendError that names `where`; `key` is never in it."""
    from openai import APIError

    try:
        yield
    except APIError as error:
        said = f"{type(error).__name__}: {error.message}"
        said = said.replace(key, "***") if key else said
        raise BackendError(
            f"the fine-tuning API at {where}: {said}", temporary=is_temporary(error)
        ) from error


def is_temporary(error: APIError) -> bool:
    """Whether the same request may do later: there was no answer, too many requests, or a server error."""
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError)


def error_repr(job: FineTuningJob) -> str | None:
    """`Code: c. Message: m. Parameter: p.` of a job that failed; None of others."""
    error = job.error
    if error is None or not (error.code or error.message):
        return None
    told = f"Code: {error.code}. Message: {error.message}."
    return f"{told} Parameter: {error.param}." if error.param else told
