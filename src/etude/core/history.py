"""The history of a training run: what each epoch and each validation gave, as it is journalled."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from etude.core.job import ModelVersion, TrainingJobStatus


class EpochEntry(BaseModel, frozen=True):
    """One finished epoch: trained on, or skipped."""

    epoch: int
    """From 1, as in everything that is stored or shown; arguments of interfaces count from 0."""
    timestamp: str
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


class ValidationEntry(BaseModel, frozen=True):
    """One evaluation on the validation examples."""

    epoch: int
    """How many epochs the evaluated weights had trained for: 0 is the base model."""
    timestamp: str
    metrics: dict[str, Any] = Field(default_factory=dict)
    version: ModelVersion | None = None


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

    timestamp: str
    steps: int
    jobs: int
    seconds: float
    """Of the process that finished it."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """Those of its last job."""
    version: ModelVersion | None = None
    """The weights that training begins with."""


class History(BaseModel, frozen=True):
    """All that a run has done so far, in order."""

    run_id: str
    warm_up: WarmUpEntry | None = None
    epochs: tuple[EpochEntry, ...] = ()
    validations: tuple[ValidationEntry, ...] = ()

    @property
    def start(self) -> ModelVersion | None:
        """The weights that training began with, where a warm-up made them."""
        return None if self.warm_up is None else self.warm_up.version

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
                "epochs": tuple(entry for entry in self.epochs if entry.epoch <= epoch),
                "validations": tuple(entry for entry in self.validations if entry.epoch <= epoch),
            }
        )
