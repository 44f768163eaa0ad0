"""The records of a run, and the state that they add up to.

What a run did is a list of records. Each is a typed, frozen fact about one trained model. Nothing is ever
changed in the list: what is no longer valid is taken back by a later record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, Field

from etude.core.history import (
    EpochEntry,
    History,
    Recovery,
    ValidationEntry,
    WarmUpEntry,
    WarmUpJob,
    WentBack,
    utc_now,
)
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus
from etude.core.trajectory import Method


class StartWeights(BaseModel, frozen=True):
    """Training starts with these weights."""

    version: ModelVersion


class SampledFrom(BaseModel, frozen=True):
    """An epoch's episodes are sampled from these weights."""

    epoch: int
    """From 0."""
    version: ModelVersion | None
    """None if the backend does not report versions."""


class JobPlan(BaseModel, frozen=True):
    """The data of a job, and the version that it starts from."""

    method: Method
    rows: int
    """The number of samples."""
    data_hash: str
    """The hash of all samples, in order."""
    parent: int | None = None
    """The number of the version that the job started from; None if the backend does not report it."""
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    """The hyperparameters given with the job. The adapter's config sets the others."""
    number: int | None = None
    """The number of the version that the job makes; None after the job ended without one."""

    def differences(self, asked: JobPlan) -> list[str]:
        """Return how a requested job differs from this one, in words."""
        differences = {
            "other data": asked.data_hash != self.data_hash,
            f"another method ({self.method}, and not {asked.method})": asked.method != self.method,
            "other hyperparameters": asked.hyperparameters != self.hyperparameters,
            f"another start model (version {self.parent}, and not {asked.parent})": asked.parent
            != self.parent,
        }
        return [text for text, differs in differences.items() if differs]


class JobPlanned(BaseModel, frozen=True):
    """A job is about to be submitted, or its plan has changed."""

    name: str
    plan: JobPlan | None
    """None if the job was not made after all."""


class Submission(BaseModel, frozen=True):
    """A job was submitted, with the facts about its epoch at that time."""

    ref: TrainingJobRef
    epoch: int
    """From 0."""
    job: int = 1
    """The number of the job in its epoch."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    curriculum_state: dict[str, Any] | None = None


class JobDropped(BaseModel, frozen=True):
    """A job has failed. A resumed run submits it again under another name."""

    epoch: int | None
    """From 0; None for the warm-up."""
    job: int = 1


class JobEnded(BaseModel, frozen=True):
    """A job has ended."""

    status: TrainingJobStatus


class LineageEntry(BaseModel, frozen=True):
    """A version was adopted: its job, its data and its training metrics."""

    version: ModelVersion
    job: TrainingJobRef
    data: JobPlan | None = None
    """None for a job that was submitted elsewhere."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """The training metrics that the backend reported."""
    timestamp: str = Field(default_factory=utc_now)
    """The time of adoption: ISO 8601, UTC."""


class GroupChanged(BaseModel, frozen=True):
    """A shared model group has a new state."""

    state: dict[str, Any]


class MetricsAdded(BaseModel, frozen=True):
    """The trainer logged metrics of an epoch that was recorded already."""

    epoch: int
    """From 1."""
    metrics: dict[str, Any]


class RunEnded(BaseModel, frozen=True):
    """The run is over: a training, an evaluation or an import."""

    result: dict[str, Any] | None = None
    """The result of an evaluation or an import. Other records have the figures of a training."""
    timestamp: str = Field(default_factory=utc_now)
    """ISO 8601, UTC."""


class Reopened(BaseModel, frozen=True):
    """The run is to go on, even if it was over, because settings have changed."""

    settings: tuple[str, ...]
    """Their keys in the config."""


Record: TypeAlias = (
    WarmUpJob
    | WarmUpEntry
    | StartWeights
    | SampledFrom
    | JobPlanned
    | Submission
    | JobDropped
    | JobEnded
    | LineageEntry
    | GroupChanged
    | EpochEntry
    | ValidationEntry
    | MetricsAdded
    | WentBack
    | Recovery
    | RunEnded
    | Reopened
)
"""One fact of a run."""

KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in get_args(Record)}
"""The classes of records by their names, under which they are stored."""


def state(records: Iterable[Record], run_id: str = "") -> ModelState:
    """Return what the records of one model add up to. The result depends on nothing else."""
    whole = ModelState(run_id)
    for record in records:
        whole.apply(record)
    return whole


class ModelState:
    """Everything that a run knows about one trained model."""

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self.base: ValidationEntry | None = None
        """The validation of the base model, before a warm-up."""
        self.warm_up: WarmUpEntry | None = None
        self.warm_up_jobs: list[WarmUpJob] = []
        self.start: ModelVersion | None = None
        """The weights that training starts with."""
        self.epochs: dict[int, EpochEntry] = {}
        self.validations: dict[int, ValidationEntry] = {}
        self.sampled: dict[int, ModelVersion | None] = {}
        """The weights that an epoch (from 0) is sampled from."""
        self.plans: dict[str, JobPlan] = {}
        """Jobs by name."""
        self.submissions: dict[tuple[int, int], Submission] = {}
        """Submitted jobs by epoch (from 0) and number in it."""
        self.failures: Counter[int | None] = Counter()
        """How many jobs of an epoch (from 0; None: the warm-up) have failed, for the next one's name."""
        self.ended: dict[str, TrainingJobStatus] = {}
        """How jobs ended, by name, if that was recorded."""
        self.versions: dict[int, LineageEntry] = {}
        """Adopted versions by number, oldest first."""
        self.group: dict[str, Any] = {}
        """The state of the shared model group; empty if there is none."""
        self.recoveries: list[Recovery] = []
        self.end: RunEnded | None = None
        """The end of the run. None if it is not over, or goes on."""
        self._history: History | None = None

    @property
    def history(self) -> History:
        """The epochs and validations so far, as a value that does not change."""
        if self._history is None:
            self._history = History(
                run_id=self.run_id,
                base=self.base,
                warm_up=self.warm_up,
                epochs=tuple(self.epochs[number] for number in sorted(self.epochs)),
                validations=tuple(self.validations[number] for number in sorted(self.validations)),
                recoveries=tuple(self.recoveries),
            )
        return self._history

    @property
    def last_number(self) -> int:
        """The highest number of an adopted version; 0 for none."""
        return max(self.versions, default=0)

    @property
    def newest_number(self) -> int:
        """The highest number of any version, including versions that jobs are to make; 0 for none."""
        return max([self.last_number, *(plan.number or 0 for plan in self.plans.values())])

    def submission(self, name: str) -> Submission | None:
        """Return the submitted job with a name, or None."""
        return next((each for each in self.submissions.values() if each.ref.run_id == name), None)

    def apply(self, record: Record) -> None:
        """Take one more record into account."""
        self._history = None
        match record:
            case EpochEntry():
                self.epochs[record.epoch] = record
                self.end = None
            case ValidationEntry(is_of_base=True):
                self.base = record
            case ValidationEntry():
                self.validations[record.epoch] = record
            case MetricsAdded(epoch=epoch, metrics=metrics):
                entry = self.epochs[epoch]
                self.epochs[epoch] = entry.model_copy(update={"metrics": {**entry.metrics, **metrics}})
            case WentBack():
                self._go_back(record)
            case RunEnded():
                self.end = record
            case Reopened():
                self.end = None
            case SampledFrom():
                self.sampled[record.epoch] = record.version
            case JobPlanned(name=name, plan=None):
                self.plans.pop(name, None)
            case JobPlanned(name=name, plan=JobPlan() as plan):
                self.plans[name] = plan
            case Submission():
                self.submissions[record.epoch, record.job] = record
            case JobDropped():
                if record.epoch is not None:
                    self.submissions.pop((record.epoch, record.job), None)
                self.failures[record.epoch] += 1
            case JobEnded(status=status):
                self.ended[status.run_id] = status
            case LineageEntry():
                self.versions.setdefault(record.version.number, record)
            case GroupChanged():
                self.group = record.state
            case StartWeights():
                self.start = record.version
            case WarmUpJob():
                self.warm_up_jobs.append(record)
            case WarmUpEntry():
                self.warm_up = record
                self.start = record.version or self.start

    def _go_back(self, record: WentBack) -> None:
        """Forget what came after an epoch. Its plans keep their numbers, and its episodes their weights."""
        self.end = None
        if isinstance(record, Recovery):
            self.recoveries.append(record)
        for (epoch, job), submission in [*self.submissions.items()]:
            if epoch >= record.epoch:
                del self.submissions[epoch, job]
                self.ended.pop(submission.ref.run_id, None)
        self.epochs = {epoch: entry for epoch, entry in self.epochs.items() if epoch <= record.epoch}
        self.validations = {at: entry for at, entry in self.validations.items() if at <= record.epoch}
        last = 0 if record.back_to is None else record.back_to.number
        self.versions = {number: entry for number, entry in self.versions.items() if number <= last}
        if not record.keeps_warm_up:
            self.start = self.warm_up = None
            self.warm_up_jobs = []
