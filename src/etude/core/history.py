"""The history of a training run: the results of each epoch and each validation, as journalled."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, Field

from etude.core.evaluation import FailureCause
from etude.core.job import ModelVersion, TrainingJobStatus
from etude.core.stats import Bounds, Distribution, shown_mean


def utc_now() -> str:
    """Return the time in ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


Action: TypeAlias = Literal["off", "warn", "stop"]
"""The action of a run when an alarm rings. `off`: the alarm never rings."""


class AlarmEvent(BaseModel, frozen=True):
    """An alarm whose condition holds for an epoch or a validation."""

    alarm: str
    """Its name in `finetuning.alarms`."""
    of: str = ""
    """The evaluator or the cause of failures that it is about; empty if the alarm has only one subject."""
    is_new: bool
    """Whether it rings now: it did not hold before."""
    action: Action
    text: str
    """A sentence: the observation, its usual meaning, and what to do."""
    episode: str | None = None
    """The id of an episode that shows it."""

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the alarm among the others of the same epoch or validation."""
        return self.alarm, self.of


class Score(BaseModel, frozen=True):
    """The mean of scores, and its 95 % interval if the scores allow one."""

    mean: float | None = None
    """None if nothing was scored."""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    """The number of scores, if it is known."""
    bounds: Bounds | None = None
    """The bounds that the evaluator declares."""

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Self:
        """Return the reward in the metrics of an epoch or a validation."""
        mean, low, high = (metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high"))
        return cls(mean=mean, low=low, high=high, n=metrics.get("num_scored", metrics.get("num_examples")))

    def __str__(self) -> str:
        return "none" if self.mean is None else shown_mean(self.mean, self.low, self.high)

    @property
    def with_count(self) -> str:
        """The mean with its interval, as text, and the number of scores."""
        return f"{self}" if self.n is None or self.mean is None else f"{self}  n={self.n}"


class Measurement(BaseModel, frozen=True):
    """The record of a measurement: the base of an epoch and of a validation."""

    epoch: int
    """The number of the epoch, from 1 in everything stored or shown; arguments of interfaces count from 0.
    For a validation: the epochs that the weights had trained for, 0 for the base model."""
    timestamp: str = Field(default_factory=utc_now)
    """The end of the measurement: ISO 8601, UTC."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    version: ModelVersion | None = None
    """The weights after an epoch, or the weights that were evaluated, if the backend reports them."""
    alarms: tuple[AlarmEvent, ...] = ()
    """The alarms that hold for it."""

    @property
    def weights(self) -> ModelVersion | None:
        """The weights that its figures were measured with."""
        return self.version

    @property
    def measured_with(self) -> int | None:
        """The version number of `weights`."""
        return None if self.weights is None else self.weights.number

    @property
    def reward(self) -> Score:
        """The mean of its rewards."""
        return Score.from_metrics(self.metrics)

    @property
    def evaluators(self) -> dict[str, Score]:
        """The mean of each evaluator's scores."""
        stored: Mapping[str, Any] = self.metrics.get("evaluators") or {}
        return {name: Score.model_validate(score) for name, score in stored.items()}

    @property
    def causes(self) -> list[FailureCause]:
        """The reasons why episodes and scores failed."""
        return [FailureCause.model_validate(cause) for cause in self.metrics.get("failure_causes") or ()]

    @property
    def distribution(self) -> Distribution | None:
        """The distribution of its rewards; None if there are none."""
        return Distribution.from_metrics(self.metrics)


class EpochEntry(Measurement, frozen=True):
    """One finished epoch, trained on or skipped."""

    kind: ClassVar[Literal["epoch"]] = "epoch"
    skipped: str | None = None
    """The reason why nothing was trained on."""
    resting: str | None = None
    """The reason why the model was not due for training in this epoch: frozen, or not its turn."""
    sampled_from: ModelVersion | None = None
    """The weights that its episodes were sampled from, if the backend reports them."""
    curriculum_state: dict[str, Any] | None = None
    """The state after the epoch; None if there is no curriculum."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}"

    @property
    def is_trained(self) -> bool:
        """Whether a job was made of it."""
        return self.skipped is None and self.resting is None

    @property
    def weights(self) -> ModelVersion | None:
        """The weights that its episodes were sampled from."""
        return self.sampled_from

    @property
    def measured_on(self) -> str:
        """The episodes and the version that its figures were measured on."""
        whence = "" if self.measured_with is None else f", sampled from v{self.measured_with}"
        return f"training episodes of epoch {self.epoch}{whence}"


class ValidationEntry(Measurement, frozen=True):
    """One evaluation on the validation examples."""

    kind: ClassVar[Literal["validation"]] = "validation"
    is_of_base: bool = False
    """Whether the base model was measured, before a warm-up."""

    def __str__(self) -> str:
        return f"validation {self._when}"

    @property
    def measured_on(self) -> str:
        """The examples, the epoch and the version that its figures were measured on."""
        version = "" if self.measured_with is None else f" (v{self.measured_with})"
        return f"validation examples, {self._when}{version}"

    @property
    def _when(self) -> str:
        if self.epoch:
            return f"after epoch {self.epoch}"
        return "after the warm-up, before training" if self.metrics.get("is_warm") else "before training"


Entry: TypeAlias = EpochEntry | ValidationEntry


def entry_sort_key(entry: Entry) -> tuple[int, bool]:
    """Return a sort key for the order in which entries were made: a validation follows its epoch."""
    return entry.epoch, entry.kind == "validation"


class WarmUpJob(BaseModel, frozen=True):
    """One job of a warm-up, and the metrics measured after it."""

    steps: int
    status: TrainingJobStatus
    """The result of the job."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """`loss`, and if the reward was measured, its metrics."""
    version: ModelVersion | None = None
    """The weights after it, if the backend reports them."""
    is_over: bool
    """Whether the warm-up ends with this job."""


class WarmUpEntry(BaseModel, frozen=True):
    """A finished warm-up, in which the model imitated examples before its first measurement and training."""

    timestamp: str = Field(default_factory=utc_now)
    steps: int
    jobs: int
    seconds: float
    """Seconds in the process that finished it."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """The metrics of its last job."""
    version: ModelVersion | None = None
    """The weights that training begins with."""


class WentBack(BaseModel, frozen=True):
    """The run goes back to an earlier point, and makes again what came after it."""

    epoch: int
    """The last epoch that is kept; 0 keeps none."""
    back_to: ModelVersion | None
    """The last version that is kept; None if training begins anew."""
    keeps_warm_up: bool = True


class Recovery(WentBack, frozen=True):
    """Stored weights were missing or damaged. This tells how the run continues without them."""

    timestamp: str = Field(default_factory=utc_now)
    damage: tuple[str, ...]
    """The damage found, one clause per file."""
    lost: tuple[ModelVersion, ...]
    """The versions that are made again, oldest first."""
    epochs: tuple[int, ...] = ()
    """The epochs that are trained again, on their recorded episodes."""

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
        """Return whether a version was made again and now differs from the lost one."""
        return any(lost.number == version.number and lost.digest != version.digest for lost in self.lost)


class History(BaseModel, frozen=True):
    """Everything that a run has done so far, each kind in the order of its epochs."""

    run_id: str
    base: ValidationEntry | None = None
    """The validation of the base model before a warm-up."""
    warm_up: WarmUpEntry | None = None
    epochs: tuple[EpochEntry, ...] = ()
    validations: tuple[ValidationEntry, ...] = ()
    recoveries: tuple[Recovery, ...] = ()

    @property
    def start(self) -> ModelVersion | None:
        """The weights that training began with, if a warm-up made them."""
        return None if self.warm_up is None else self.warm_up.version

    @property
    def all_validations(self) -> tuple[ValidationEntry, ...]:
        """All validations. The validation of the base model before a warm-up comes first."""
        return self.validations if self.base is None else (self.base, *self.validations)

    @property
    def entries(self) -> list[Entry]:
        """All epochs and validations in the order in which they were made."""
        return sorted([*self.epochs, *self.validations], key=entry_sort_key)

    def epoch(self, number: int) -> EpochEntry | None:
        """Return the entry of an epoch (from 1); None if it has none."""
        return next((entry for entry in self.epochs if entry.epoch == number), None)

    def validation(self, epoch: int) -> ValidationEntry | None:
        """Return the entry of the validation after an epoch; None if it has none."""
        return next((entry for entry in self.validations if entry.epoch == epoch), None)

    @property
    def trained_epochs(self) -> list[EpochEntry]:
        """The epochs that were trained on."""
        return [entry for entry in self.epochs if entry.is_trained]

    def until(self, epoch: int) -> Self:
        """Return the history as it was after `epoch` and the validation that followed it."""
        return self.model_copy(
            update={
                "epochs": tuple(entry for entry in self.epochs if entry.epoch <= epoch),
                "validations": tuple(entry for entry in self.validations if entry.epoch <= epoch),
            }
        )
