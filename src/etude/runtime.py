"""What is running: the parts of one run, assembled from its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from etude.core.example import Example
from etude.core.progress import Progress, Silent
from etude.inference.engine import Engine

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.config.schema import Config
    from etude.rewards.evaluation_run import EvaluationRun
    from etude.store.run_folder import RunFolder


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
