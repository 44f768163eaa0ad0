"""The state of a group, and reading one: its own, or that of Neural Interactive Proofs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from etude.backends.openai_jobs import OpenAiJobs, hosted_version
from etude.core.errors import RequestError
from etude.core.job import ModelVersion, TrainingJobRef
from etude.groups.line import ModelLine


class SharedModelGroupState(BaseModel):
    """The state of a group, from which it goes on in another process."""

    model_config = ConfigDict(frozen=True)

    fine_tune_job: TrainingJobRef | None = None
    """The last job that was made."""
    version: ModelVersion | None = None
    """The weights that are sampled from; None is the base model, before anything else is known."""

    @property
    def fine_tune_job_id(self) -> str | None:
        """The name of the last job."""
        return None if self.fine_tune_job is None else self.fine_tune_job.run_id

    @property
    def fine_tuned_model_name(self) -> str | None:
        """The name or folder of the fine-tuned weights; None for the base model."""
        return self.version.location if self.version is not None and self.version.number else None


_OWN = {"fine_tune_job": tuple(TrainingJobRef.model_fields), "version": tuple(ModelVersion.model_fields)}
_NIP = ("fine_tune_job_id", "fine_tuned_model_name")
_NO_JOBS = ("dummy_job_id", "frozen_job_id", "insufficient_data_job_id")
"""Stand for a job there when nothing was submitted."""
_NO_MODEL = "dummy_model_name"
"""Stands for the model of a dry run there, which was never trained."""


@dataclass(frozen=True, slots=True)
class HostedState:
    """A state by the names that an API has for job and model."""

    job_id: str | None
    """The last job; None when there was none."""
    model: str | None
    """The fine-tuned model; None for the base model."""


def read_state(checkpoint: object) -> SharedModelGroupState | HostedState:
    """The state in a checkpoint: a state, a dataclass, or a dict.

    Raises RequestError that names the keys that are not those of a state.
    """
    if isinstance(checkpoint, SharedModelGroupState):
        return checkpoint
    if is_dataclass(checkpoint) and not isinstance(checkpoint, type):
        checkpoint = asdict(checkpoint)
    if not isinstance(checkpoint, Mapping):
        raise RequestError(f"a group's state is a dict, and this is {type(checkpoint).__name__}")
    if set(checkpoint) and set(checkpoint) <= set(_NIP):
        return _hosted(checkpoint)
    _require_keys(checkpoint, _OWN, "")
    for name, keys in _OWN.items():
        if isinstance(checkpoint.get(name), Mapping):
            _require_keys(checkpoint[name], keys, f"{name}.")
    try:
        return SharedModelGroupState.model_validate(checkpoint)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"the group's state has a wrong '{where}': {first['msg']}") from error


def by_own_names(state: HostedState, base: str, line: ModelLine) -> SharedModelGroupState:
    """The state with a version's number: the one that the lineage knows the model by, or the next.

    `base` is the base model. Raises RequestError where the line's adapter has no such jobs and models.
    """
    adapter, job = line.adapter, None
    if not isinstance(adapter, OpenAiJobs):
        raise RequestError(
            f"the state names a job and a model of a fine-tuning API, and the group trains through "
            f"'{adapter.adapter_config.type_name}'; that needs 'lm_server' or 'openai'"
        )
    if state.job_id is not None:
        job = TrainingJobRef(run_id=state.job_id, backend=adapter.backend, metadata={"job_id": state.job_id})
    if state.model is None or state.model == base:
        return SharedModelGroupState(fine_tune_job=job)
    noted = [entry.version for entry in line.log.entries() if entry.version.location == state.model]
    new = hosted_version(line.log.newest() + 1, state.job_id or "", state.model)
    return SharedModelGroupState(fine_tune_job=job, version=noted[-1] if noted else new)


def _require_keys(state: Mapping[Any, Any], known: Any, prefix: str) -> None:
    unknown = sorted(f"'{prefix}{key}'" for key in state if key not in known)
    if unknown or not state:
        ours, theirs = (" and ".join(f"'{prefix}{key}'" for key in keys) for keys in (known, _NIP))
        or_theirs = "" if prefix else f", one of Neural Interactive Proofs {theirs}"
        raise RequestError(
            f"this is no state of a group: it has {', '.join(unknown) or 'no keys'}, and a state has "
            f"{ours}{or_theirs}. Nothing was changed"
        )


def _hosted(checkpoint: Mapping[str, Any]) -> HostedState:
    for name in _NIP:
        value = checkpoint.get(name)
        if not (value is None or (isinstance(value, str) and value)):
            raise RequestError(
                f"the group's state has a wrong '{name}': a text or None, and not {value!r:.60}"
            )
    job, model = checkpoint.get(_NIP[0]), checkpoint.get(_NIP[1])
    if model == _NO_MODEL:
        raise RequestError(
            f"'{_NIP[1]}' is '{_NO_MODEL}', which stands for a model that was never trained. Leave the state "
            "out to begin with the base model"
        )
    return HostedState(None if job in _NO_JOBS else job, model)
