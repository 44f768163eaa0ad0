"""What an epoch trains on, made ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from etude.core.job import ModelVersion, TrainingJobRef
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.store.log import Submission


@dataclass(frozen=True)
class Prepared:
    """The data of an epoch's job and what is known of it, whatever the trainer prepares meanwhile."""

    work: TrainingJobRef | TrajectoryCollection | Skipped
    """The job that there is already, or what to submit, or why there is nothing."""
    metrics: dict[str, Any] = field(default_factory=dict)
    curriculum_state: dict[str, Any] | None = None
    """After the epoch."""
    sampled_from: ModelVersion | None = None
    """The weights of its episodes, where the backend says."""

    @classmethod
    def of(cls, submitted: Submission) -> Prepared:
        """A job that an earlier process submitted."""
        return cls(submitted.ref, submitted.metrics, submitted.curriculum_state, submitted.sampled_from)
