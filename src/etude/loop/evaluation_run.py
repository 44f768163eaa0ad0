"""An evaluation by the names of the NeMo Agent Toolkit: `EvaluationRun(config).run_and_evaluate()`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from etude.config.schema import Config
from etude.core.data_model import DataModel
from etude.core.evaluation import EvaluationRunOutput
from etude.loop.arguments import load
from etude.loop.evaluation import evaluate
from etude.loop.lifecycle import new_run
from etude.store.stored_config import EvaluationRequest


class EvaluationRunConfig(DataModel, arbitrary_types_allowed=True):
    """The config that is evaluated, and on which examples."""

    config_file: Path | dict[str, Any] | Config
    """A config: its file, or its content."""
    dataset: Path | str | None = None
    """A file of examples in place of those that the config names."""
    override: tuple[tuple[str, str], ...] = ()
    """Keys of the config with other values, as `-o` of the command line has them."""
    reps: int = Field(default=1, ge=1)
    """Episodes for each example."""


class EvaluationRun:
    """One evaluation, in a run folder of its own."""

    def __init__(self, config: EvaluationRunConfig) -> None:
        self.config = config

    async def run_and_evaluate(self) -> EvaluationRunOutput:
        """Play the episodes and score them. Raises as `etude.evaluate` does."""
        config, request = self._loaded(), EvaluationRequest(repeat=self.config.reps)
        with new_run(config, None, request) as run:
            return (await evaluate(config, run, request)).output

    def _loaded(self) -> Config:
        given, changes = self.config, list(self.config.override)
        if given.dataset is not None:
            # Looked for in the current folder first, as everything that a program names.
            path = Path(given.dataset).absolute()
            source = str(path if path.exists() else given.dataset)
            changes.append(("finetuning.run_configuration.dataset", json.dumps(source)))
        return load(given.config_file, changes).for_evaluation()
