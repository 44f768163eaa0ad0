"""The state of a group, and the parser for Etude's and Neural Interactive Proofs' states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

from pydantic import BaseModel, Field, ValidationError, field_validator

from etude.backends.openai_api import hosted_version
from etude.backends.openai_jobs import OpenAiJobs
from etude.core.errors import RequestError
from etude.core.job import ModelVersion, TrainingJobRef
from etude.groups.model_jobs import ModelJobs


class SharedModelGroupState(BaseModel, frozen=True, extra="forbid"):
    """The state of a group, from which another process can continue."""

    fine_tune_job: TrainingJobRef | None = None
    """The last job; None before the first."""
    version: ModelVersion | None = None
    """The version that the engine samples from; None for the base model, until a version is known."""

    @property
    def fine_tune_job_id(self) -> str | None:
        """The name of the last job."""
        return None if self.fine_tune_job is None else self.fine_tune_job.run_id

    @property
    def fine_tuned_model_name(self) -> str | None:
        """The name or folder of the fine-tuned weights; None for the base model."""
        return self.version.location if self.version is not None and self.version.number else None


_NO_JOBS = ("dummy_job_id", "frozen_job_id", "insufficient_data_job_id")
"""The job ids that Neural Interactive Proofs uses when nothing was submitted."""
_NO_MODEL = "dummy_model_name"
"""The model name that Neural Interactive Proofs uses in a dry run, where no model was trained."""


class HostedState(BaseModel, frozen=True):
    """A state of Neural Interactive Proofs, with the API's names for the job and the model."""

    fine_tune_job_id: str | None = Field(default=None, min_length=1)
    """The last job; None before the first."""
    fine_tuned_model_name: str | None = Field(default=None, min_length=1)
    """The fine-tuned model; None for the base model."""

    @field_validator("fine_tune_job_id")
    @classmethod
    def _check_submitted(cls, value: str | None) -> str | None:
        return None if value in _NO_JOBS else value

    @field_validator("fine_tuned_model_name")
    @classmethod
    def _check_trained_name(cls, value: str | None) -> str | None:
        if value == _NO_MODEL:
            raise ValueError(
                f"'{_NO_MODEL}' stands for a model that was never trained. Leave the state out to begin with "
                "the base model"
            )
        return value


def read_state(checkpoint: object) -> SharedModelGroupState | HostedState:
    """Return the state in a checkpoint, which is a state, a dataclass or a dict.

    Raises RequestError with the wrong or unknown key if it is not a state.
    """
    if is_dataclass(checkpoint) and not isinstance(checkpoint, type):
        checkpoint = asdict(checkpoint)
    keys = checkpoint.keys() if isinstance(checkpoint, Mapping) else set()
    is_hosted = keys and keys <= HostedState.model_fields.keys()
    try:
        return (HostedState if is_hosted else SharedModelGroupState).model_validate(checkpoint or None)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = f"'{'.'.join(map(str, first['loc']))}': " if first["loc"] else ""
        raise RequestError(
            f"this is not a group's state: {where}{first['msg']}. A state has "
            "'fine_tune_job' and 'version', one of Neural Interactive Proofs 'fine_tune_job_id' and "
            "'fine_tuned_model_name'. Nothing was changed"
        ) from error


def from_hosted_state(state: HostedState, base: str, jobs: ModelJobs) -> SharedModelGroupState:
    """Convert the state to Etude's. The version's number comes from the lineage, or is the next free one.

    `base` is the base model. Raises RequestError if the adapter of `jobs` does not use a fine-tuning API.
    """
    adapter, job, model = jobs.adapter, None, state.fine_tuned_model_name
    if not isinstance(adapter, OpenAiJobs):
        raise RequestError(
            f"the state names a job and a model of a fine-tuning API, and the group trains through "
            f"'{adapter.adapter_config.type_name}'; that needs 'lm_server' or 'openai'"
        )
    name = state.fine_tune_job_id
    if name is not None:
        job = TrainingJobRef(run_id=name, backend=adapter.backend, metadata={"job_id": name})
    if model is None or model == base:
        return SharedModelGroupState(fine_tune_job=job)
    noted = [entry.version for entry in jobs.log.state.versions.values() if entry.version.location == model]
    new = hosted_version(jobs.log.state.newest_number + 1, name or "", model)
    return SharedModelGroupState(fine_tune_job=job, version=noted[-1] if noted else new)
