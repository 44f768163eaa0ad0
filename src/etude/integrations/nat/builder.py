"""The toolkit's trajectory builder `etude_traj_builder`."""

from __future__ import annotations

from typing import Any

from nat.data_models.evaluate_runtime import EvaluationRunOutput
from nat.data_models.finetuning import TrajectoryCollection
from nat.finetuning import TrajectoryBuilder

from etude.algorithms import trajectory_builder
from etude.core.errors import RequestError
from etude.integrations.nat.configs import EtudeTrajectoryBuilderConfig
from etude.integrations.nat.values import evaluation_to_toolkit, to_toolkit


class EtudeTrajectoryBuilder(TrajectoryBuilder):
    """A trajectory builder of Etude's, by the toolkit's interface."""

    def __init__(self, trajectory_builder_config: EtudeTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self._etude: trajectory_builder.TrajectoryBuilder | None = None

    @property
    def etude(self) -> trajectory_builder.TrajectoryBuilder:
        """The builder that does the work. Raises RequestError before `etude_trainer` has started."""
        if self._etude is None:
            raise RequestError("`etude_traj_builder` works within a trainer of `_type: etude_trainer` alone")
        return self._etude

    def bind(self, etude: trajectory_builder.TrajectoryBuilder) -> None:
        """Hand over the builder that does the work."""
        self._etude = etude

    async def run_eval(self) -> EvaluationRunOutput:
        """One episode for each example, scored."""
        return evaluation_to_toolkit(await self.etude.run_eval())

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """See the toolkit. Raises ValueError when `run_id` is being collected already."""
        await self.etude.start_run(run_id=run_id, meta=meta)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """See the toolkit. Raises ErrorBudgetExceeded when too many episodes or scores failed."""
        return to_toolkit(await self.etude.finalize(run_id=run_id, meta=meta))

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """See the toolkit."""
        self.etude.log_progress(run_id, metrics, output_dir)
