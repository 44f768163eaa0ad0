"""A job: one unit of training, its status, and the values for a job that was not started."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, field_validator

from etude.core.data_model import DataModel
from etude.core.secrets import mask_secrets


class TrainingStatusEnum(StrEnum):
    """The status of a training job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    NOT_FOUND = "not_found"
    """The backend answered, and knows no such job."""

    @property
    def is_final(self) -> bool:
        """Whether the job's status can no longer change."""
        return self not in (TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING)


class TrainingJobRef(DataModel, revalidate_instances="always"):
    """The reference to a submitted job, sufficient to find it from another process."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class ModelVersion(BaseModel, frozen=True):
    """Weights that a job produced, for engines to adopt."""

    number: int = Field(ge=0)
    """0 is the base model; each job that trains makes the next."""
    location: str
    """A folder, or the backend's name for the model."""
    digest: str
    """Hash of the weights, which shows that they changed and that the engine has the right ones."""


class TrainingJobStatus(DataModel, revalidate_instances="always"):
    """The state of a job at one moment."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = Field(default=None, ge=0, le=100)
    """Percent done, if the backend reports it."""
    message: Annotated[str, AfterValidator(mask_secrets)] | None = None
    """Text from a person or another program, with secrets masked."""
    metadata: dict[str, Any] | None = None
    """Facts from the backend, with the job's metrics under `metrics`."""
    version: ModelVersion | None = None
    """The weights that a completed job made, if the backend reports them."""

    @field_validator("metadata")
    @classmethod
    def _check_metrics(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        metrics = (metadata or {}).get("metrics")
        if not isinstance(metrics, Mapping | None):
            raise ValueError(f"'metrics' maps names to values, found {metrics!r:.80}")
        return metadata

    @property
    def metrics(self) -> dict[str, Any]:
        """The job's metrics in `metadata`; empty if there are none."""
        metrics = (self.metadata or {}).get("metrics") or {}
        return {str(name): value for name, value in metrics.items()}


class Skipped(BaseModel, frozen=True):
    """The result if there was nothing to train on. It is never a success."""

    reason: str
    """One sentence for a person: what was missing, and why."""


class Frozen(Skipped):
    """The result for a model that must not be trained."""


class DryRun(Skipped):
    """The result of a dry run: everything was prepared, and nothing was submitted."""

    rows: int
    """Rows of the data set that a real run would have submitted."""
