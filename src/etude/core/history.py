"""The history of a training run: what each epoch and each validation gave, as it is journalled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field

from etude.core.job import ModelVersion, TrainingJobStatus


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


class EpochEntry(BaseModel, frozen=True):
    """One finished epoch: trained on, or skipped."""

    epoch: int
    """From 1, as in everything that is stored or shown; arguments of interfaces count from 0."""
    timestamp: str = Field(default_factory=_now)
    """When it finished: ISO 8601, UTC."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    status: TrainingJobStatus | None = None
    """How its training job ended; None for a skipped epoch, and for one that the model rested in."""
    skipped: str | None = None
    """Why nothing was trained on."""
    resting: str | None = None
    """Why the model was not meant to be trained in this epoch: frozen, or not its turn."""
    sampled_from: ModelVersion | None = None
    """The weights that its episodes were sampled from, where the backend says."""
    version: ModelVersion | None = None
    """The weights after it."""
    curriculum_state: dict[str, Any] | None = None
    """After the epoch; None when there is no curriculum."""
    alarms: tuple[AlarmEvent, ...] = ()
    """The alarms that hold for it."""
    back_to: ModelVersion | None = None
    """The version that an alarm had the model go back to, after all that."""


class ValidationEntry(BaseModel, frozen=True):
    """One evaluation on the validation examples."""

    epoch: int
    """How many epochs the evaluated weights had trained for: 0 is the base model."""
    timestamp: str = Field(default_factory=_now)
    metrics: dict[str, Any] = Field(default_factory=dict)
    version: ModelVersion | None = None
    alarms: tuple[AlarmEvent, ...] = ()
    """As of an epoch."""
    back_to: ModelVersion | None = None
    """As of an epoch."""


Entry: TypeAlias = EpochEntry | ValidationEntry


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
        made: list[Entry] = [*self.epochs, *self.validations]
        return sorted(made, key=lambda entry: (entry.epoch, isinstance(entry, ValidationEntry)))

    def went_back(self, epoch: int) -> ModelVersion | None:
        """The version that the model went back to after an epoch (from 1) or its validation, if it did."""
        made = self.validation(epoch), self.epoch(epoch)  # A validation comes after its epoch.
        return next((entry.back_to for entry in made if entry is not None and entry.back_to), None)

    def epoch(self, number: int) -> EpochEntry | None:
        """The entry of an epoch (from 1); None where it has none."""
        return _of_epoch(self.epochs, number)

    def validation(self, epoch: int) -> ValidationEntry | None:
        """The entry of the validation after an epoch; None where it has none."""
        return _of_epoch(self.validations, epoch)

    @property
    def trained(self) -> list[EpochEntry]:
        """The epochs that were trained on."""
        return [entry for entry in self.epochs if entry.status is not None]

    @property
    def skipped(self) -> list[EpochEntry]:
        """The epochs that were not."""
        return [entry for entry in self.epochs if entry.skipped is not None]

    def with_epoch(self, entry: EpochEntry) -> History:
        """The history with the epoch, in place of what it has of it."""
        others = [other for other in self.epochs if other.epoch != entry.epoch]
        epochs = sorted([*others, entry], key=lambda each: each.epoch)
        return self.model_copy(update={"epochs": tuple(epochs)})

    def with_validation(self, entry: ValidationEntry) -> History:
        """The history and one validation more."""
        return self.model_copy(update={"validations": (*self.validations, entry)})

    def until(self, epoch: int) -> History:
        """The history as it was after `epoch` and the validation that followed it."""
        return self.model_copy(
            update={
                "epochs": self.epochs[: bisect_right(self.epochs, epoch, key=_number)],
                "validations": self.validations[: bisect_right(self.validations, epoch, key=_number)],
            }
        )


E = TypeVar("E", EpochEntry, ValidationEntry)


def _number(entry: Entry) -> int:
    return entry.epoch


def _of_epoch(entries: Sequence[E], epoch: int) -> E | None:
    place = bisect_right(entries, epoch, key=_number) - 1
    return entries[place] if place >= 0 and entries[place].epoch == epoch else None
