"""What is running: the parts of one run, assembled from its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from etude.core.example import Example
from etude.core.history import History
from etude.core.progress import Progress, Silent
from etude.inference.engine import Engine

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.config.schema import Config
    from etude.rewards.evaluation_run import EvaluationRun
    from etude.store.run_folder import RunFolder


Report = Callable[[History, Path, bool], None]
"""Writes the metrics files of a history into a folder; True when the run is over."""


@dataclass(frozen=True)
class Runtime:
    """Everything that builders and trainers work with."""

    config: Config
    run: RunFolder
    builder: Builder
    evaluation: EvaluationRun
    examples: Sequence[Example]
    engines: Mapping[str, Engine]
    target_model: str
    """The entry of `llms` that is trained."""
    validation_examples: Sequence[Example] = ()
    """Held-out examples; empty when there is no validation."""
    phase: str = "eval"
    """Prefix of the episode ids that `TrajectoryBuilder.run_eval` makes."""
    progress: Progress = field(default_factory=Silent)
    report: Report | None = None
    """Called after every epoch and validation, once it is journalled."""
