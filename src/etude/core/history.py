"""The history of a training run: what each epoch and each validation gave, as it is journalled."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, Field

from etude.core.distribution import Distribution
from etude.core.evaluation import FailureCause
from etude.core.job import ModelVersion, TrainingJobStatus
from etude.core.stats import Bounds, shown_mean


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


Action: TypeAlias = Literal["off", "warn", "pause", "stop", "rollback"]
"""The part of a run when an alarm rings. `off`: it never does."""


class AlarmEvent(BaseModel, frozen=True):
    """An alarm that holds for an epoch or a validation."""

    alarm: str
    """Its name in `finetuning.alarms`."""
    of: str = ""
    """Which of several things it is about: an evaluator, a cause of failures; empty where there is one."""
    since: int
    """The first epoch, or validation, of those in a row that it holds for."""
    is_new: bool
    """Whether it rings here: it did not hold before."""
    action: Action
    text: str
    """A sentence: what was seen, since when, what that usually means, what to do."""
    episode: str | None = None
    """The id of an episode that shows it."""

    @property
    def key(self) -> tuple[str, str]:
        """Tells it apart from the others of the same epoch or validation."""
        return self.alarm, self.of


class Score(BaseModel, frozen=True):
    """The mean of scores, and its 95 % interval where they tell one."""

    mean: float | None = None
    """None where nothing was scored."""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    """How many scores there are, where that is known."""
    bounds: Bounds | None = None
    """Those that the evaluator declares."""

    @classmethod
    def among(cls, metrics: Mapping[str, Any]) -> Self:
        """The reward of the metrics of an epoch or a validation."""
        mean, low, high = (metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high"))
        return cls(mean=mean, low=low, high=high, n=metrics.get("num_scored", metrics.get("num_examples")))

    def __str__(self) -> str:
        return "none" if self.mean is None else shown_mean(self.mean, self.low, self.high, n=self.n)

    @property
    def counted(self) -> str:
        """The same with how many scores there are."""
        return f"{self}" if self.n is None or self.mean is None else f"{self}  n={self.n}"

    @property
    def interval(self) -> str:
        """The mean with its interval, and nothing about why there is none."""
        return "none" if self.mean is None else shown_mean(self.mean, self.low, self.high)


class Measurement(BaseModel, frozen=True):
    """The record of something measured: the base of an epoch and of a validation."""

    epoch: int
    """From 1, as in everything that is stored or shown; arguments of interfaces count from 0. Of a
    validation: how many epochs the evaluated weights had trained for, 0 of the base model."""
    timestamp: str = Field(default_factory=_now)
    """When it finished: ISO 8601, UTC."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    version: ModelVersion | None = None
    """The weights after an epoch, and those that were evaluated, where the backend says."""
    alarms: tuple[AlarmEvent, ...] = ()
    """The alarms that hold for it."""
    back_to: ModelVersion | None = None
    """The version that an alarm had the model go back to, after all that."""

    @property
    def weights(self) -> ModelVersion | None:
        """Those that its figures are of."""
        return self.version

    @property
    def measured_with(self) -> int | None:
        """The number of the same."""
        return None if self.weights is None else self.weights.number

    @property
    def reward(self) -> Score:
        """The mean of its rewards."""
        return Score.among(self.metrics)

    @property
    def evaluators(self) -> dict[str, Score]:
        """The mean of each evaluator's scores."""
        stored: Mapping[str, Any] = self.metrics.get("evaluators") or {}
        return {name: Score.model_validate(score) for name, score in stored.items()}

    @property
    def causes(self) -> list[FailureCause]:
        """Why episodes and scores failed."""
        return [FailureCause.model_validate(cause) for cause in self.metrics.get("failure_causes") or ()]

    @property
    def distribution(self) -> Distribution | None:
        """How its rewards lie; None where there were none."""
        return Distribution.among(self.metrics)


class EpochEntry(Measurement, frozen=True):
    """One finished epoch: trained on, or skipped."""

    kind: ClassVar[Literal["epoch"]] = "epoch"
    status: TrainingJobStatus | None = None
    """How its training job ended; None for a skipped epoch, and for one that the model rested in."""
    skipped: str | None = None
    """Why nothing was trained on."""
    resting: str | None = None
    """Why the model was not meant to be trained in this epoch: frozen, or not its turn."""
    sampled_from: ModelVersion | None = None
    """The weights that its episodes were sampled from, where the backend says."""
    curriculum_state: dict[str, Any] | None = None
    """After the epoch; None when there is no curriculum."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}"

    @property
    def weights(self) -> ModelVersion | None:
        """Those that its episodes were sampled from."""
        return self.sampled_from

    @property
    def measured_on(self) -> str:
        """On what its figures were measured, and with which version."""
        whence = "" if self.measured_with is None else f", sampled from v{self.measured_with}"
        return f"training episodes of epoch {self.epoch}{whence}"


class ValidationEntry(Measurement, frozen=True):
    """One evaluation on the validation examples."""

    kind: ClassVar[Literal["validation"]] = "validation"

    def __str__(self) -> str:
        return f"validation {self._when}"

    @property
    def measured_on(self) -> str:
        """As of an epoch."""
        version = "" if self.measured_with is None else f" (v{self.measured_with})"
        return f"validation examples, {self._when}{version}"

    @property
    def _when(self) -> str:
        if self.epoch:
            return f"after epoch {self.epoch}"
        return "after the warm-up, before training" if self.metrics.get("is_warm") else "before training"


Entry: TypeAlias = EpochEntry | ValidationEntry


def moment(entry: Entry) -> tuple[int, bool]:
    """Sorts epochs and validations as they were made: a validation comes after its epoch."""
    return entry.epoch, entry.kind == "validation"


class WarmUpJob(BaseModel, frozen=True):
    """One job of a warm-up, and what was measured after it."""

    stage: int
    """Index of its stage."""
    steps: int
    """Optimiser steps."""
    status: TrainingJobStatus
    """How the job ended."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """`loss`, and where the reward was measured the metrics of that."""
    version: ModelVersion | None = None
    """The weights after it, where the backend says."""
    is_over: bool
    """Whether the stage is over with it."""


class WarmUpEntry(BaseModel, frozen=True):
    """A finished warm-up: what the model imitated before it was first measured and trained."""

    timestamp: str = Field(default_factory=_now)
    steps: int
    jobs: int
    seconds: float
    """Of the process that finished it."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """Those of its last job."""
    version: ModelVersion | None = None
    """The weights that training begins with."""


class Recovery(BaseModel, frozen=True):
    """Stored weights that were not there, or not as written, and how the run went on without them."""

    timestamp: str = Field(default_factory=_now)
    damage: tuple[str, ...]
    """A clause for each file: what was found."""
    lost: tuple[ModelVersion, ...]
    """The versions that are made again, oldest first."""
    back_to: ModelVersion | None = None
    """The version that the run went back to; None where training began anew."""
    epochs: tuple[int, ...] = ()
    """The epochs that are trained again, on the episodes that they had."""

    def __str__(self) -> str:
        anew = "the model that training began with"
        start = f"version {self.back_to.number}" if self.back_to and self.back_to.number else anew
        first, last = (self.epochs[0], self.epochs[-1]) if self.epochs else (0, 0)
        if not self.epochs:
            again = "the warm-up is done again"
        else:
            which = f"epoch {first}" if first == last else f"epochs {first} to {last}"
            again = f"{which} will be trained again, on the episodes that are there"
        why = f"stored weights are damaged or were not written: {'; '.join(self.damage)}"
        return f"{why}. The run goes back to {start}: {again}"

    def differs(self, version: ModelVersion) -> bool:
        """Whether a version has been made again, and is not what it was."""
        return any(lost.number == version.number and lost.digest != version.digest for lost in self.lost)


class History(BaseModel, frozen=True):
    """All that a run has done so far, each kind in the order of its epochs."""

    run_id: str
    base: ValidationEntry | None = None
    """The base model, measured before a warm-up."""
    warm_up: WarmUpEntry | None = None
    epochs: tuple[EpochEntry, ...] = ()
    validations: tuple[ValidationEntry, ...] = ()
    recoveries: tuple[Recovery, ...] = ()

    @property
    def start(self) -> ModelVersion | None:
        """The weights that training began with, where a warm-up made them."""
        return None if self.warm_up is None else self.warm_up.version

    @property
    def measured(self) -> tuple[ValidationEntry, ...]:
        """All validations, that of the base model before a warm-up first."""
        return self.validations if self.base is None else (self.base, *self.validations)

    @property
    def entries(self) -> list[Entry]:
        """All epochs and validations in the order in which they were made."""
        return sorted([*self.epochs, *self.validations], key=moment)

    def went_back(self, epoch: int) -> ModelVersion | None:
        """The version that the model went back to after an epoch (from 1) or its validation, if it did."""
        made = self.validation(epoch), self.epoch(epoch)  # A validation comes after its epoch.
        return next((entry.back_to for entry in made if entry is not None and entry.back_to), None)

    def epoch(self, number: int) -> EpochEntry | None:
        """The entry of an epoch (from 1); None where it has none."""
        return next((entry for entry in self.epochs if entry.epoch == number), None)

    def validation(self, epoch: int) -> ValidationEntry | None:
        """The entry of the validation after an epoch; None where it has none."""
        return next((entry for entry in self.validations if entry.epoch == epoch), None)

    @property
    def trained(self) -> list[EpochEntry]:
        """The epochs that were trained on."""
        return [entry for entry in self.epochs if entry.status is not None]

    @property
    def skipped(self) -> list[EpochEntry]:
        """The epochs that were not."""
        return [entry for entry in self.epochs if entry.skipped is not None]

    def alike(self, entry: Entry) -> tuple[Entry, ...]:
        """The epochs, or the validations: those that are of the same kind as an entry."""
        return self.epochs if entry.kind == "epoch" else self.validations

    def with_entry(self, entry: Entry) -> History:
        """The history with an epoch or a validation, in place of what it has of it."""
        others = [other for other in self.alike(entry) if other.epoch != entry.epoch]
        return self.model_copy(update={f"{entry.kind}s": tuple(sorted([*others, entry], key=moment))})

    def until(self, epoch: int) -> History:
        """The history as it was after `epoch` and the validation that followed it."""
        return self.model_copy(
            update={
                "epochs": tuple(entry for entry in self.epochs if entry.epoch <= epoch),
                "validations": tuple(entry for entry in self.validations if entry.epoch <= epoch),
            }
        )
