"""A job: one unit of training, where it stands, and what stands in for one that was not begun."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from etude.core.data_model import DataModel
from etude.core.secrets import masked


class TrainingStatusEnum(StrEnum):
    """Where a training job stands."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    NOT_FOUND = "not_found"
    """The backend answered, and knows no such job."""

    @property
    def is_final(self) -> bool:
        """Whether the job will not change any more."""
        return self not in (TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING)


class TrainingJobRef(DataModel, revalidate_instances="always"):
    """Names a submitted job well enough to find it again from another process."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class ModelVersion(BaseModel, frozen=True):
    """Weights that a job produced: what an engine adopts."""

    number: int = Field(ge=0)
    """0 is the base model; each job that trains makes the next."""
    location: str
    """A folder, or the backend's name for the model."""
    digest: str
    """Hash of the weights, to show that they changed and that the engine has the right ones."""


class TrainingJobStatus(DataModel, revalidate_instances="always"):
    """The state of a job at one moment."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = Field(default=None, ge=0, le=100)
    """Percent done, where the backend says."""
    message: Annotated[str, AfterValidator(masked)] | None = None
    """A person's words, or another program's; secrets in them are masked."""
    metadata: dict[str, Any] | None = None
    """Backend facts: metrics of the job under `metrics`."""
    version: ModelVersion | None = None
    """The weights that a completed job made, where the backend says."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The numbers to show, as the metadata has them."""
        return (self.metadata or {}).get("metrics") or {}


class Skipped(BaseModel, frozen=True):
    """Stands in for a training job where there was nothing to train on. It is never a success."""

    reason: str
    """One sentence for a person: what was missing, and why."""


class Frozen(Skipped):
    """Stands in for the job of a model that is not to be trained."""


class DryRun(Skipped):
    """Stands in for the job of a dry run: everything was made ready, and nothing was submitted."""

    rows: int
    """Rows of the data set that a real run would have submitted."""
