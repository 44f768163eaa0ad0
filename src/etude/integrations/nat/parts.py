"""The toolkit's trajectory builder and trainer adapter, and the configs of all three parts of the plug-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nat.data_models.evaluate_runtime import EvaluationRunOutput
from nat.data_models.finetuning import (
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from nat.finetuning import TrainerAdapter, TrajectoryBuilder
from pydantic import ConfigDict, Field

from etude.algorithms import trajectory_builder
from etude.backends import trainer_adapter
from etude.core.errors import RequestError
from etude.core.job import Skipped
from etude.integrations.nat.evaluation import (
    evaluation_to_toolkit,
    from_toolkit,
    job_from_toolkit,
    job_to_toolkit,
    skipped_to_toolkit,
    status_to_toolkit,
    to_toolkit,
)


class EtudeTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="etude_traj_builder"):
    """Collects episodes with Etude's recorder."""

    model_config = ConfigDict(extra="forbid")

    builder: dict[str, Any] = Field(
        default_factory=dict, description="An entry of Etude's `trajectory_builders`; by default `grpo`."
    )


class EtudeTrainerAdapterConfig(TrainerAdapterConfig, name="etude_trainer_adapter"):
    """Trains with a backend of Etude's."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    adapter: dict[str, Any] = Field(
        default_factory=dict, description="An entry of Etude's `trainer_adapters`; by default `local`."
    )
    model: dict[str, Any] = Field(
        default_factory=dict,
        description="More keys of the trained model, as Etude's `llms` have them: its device, its provider.",
    )


class EtudeTrainerConfig(TrainerConfig, name="etude_trainer"):
    """Etude's loop over epochs, with what the toolkit's `finetuning` has no keys for."""

    model_config = ConfigDict(extra="forbid")

    trainer: dict[str, Any] = Field(
        default_factory=dict, description="Keys of Etude's trainer `epochs`, such as `patience`."
    )
    validation_dataset: Path | None = Field(
        default=None, description="Held-out examples, where --validation_dataset gives none."
    )
    seed: int | None = Field(default=None, description="`finetuning.seed` of Etude's.")
    deterministic: bool | None = Field(default=None, description="`finetuning.deterministic` of Etude's.")
    error_budget: float | None = Field(default=None, description="`finetuning.error_budget` of Etude's.")
    fine_tune_from_scratch: bool | None = Field(
        default=None, description="`finetuning.fine_tune_from_scratch` of Etude's."
    )
    timeout: float | None = Field(default=None, description="Seconds that an episode may take.")
    max_calls: int | None = Field(default=None, description="Model calls that an episode may make.")


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
        """Start collecting for one epoch. Raises ValueError when `run_id` is being collected already."""
        await self.etude.start_run(run_id=run_id, meta=meta)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The collected trajectories. Raises ErrorBudgetExceeded when too many episodes or scores failed."""
        return to_toolkit(await self.etude.finalize(run_id=run_id, meta=meta))

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Log the facts of a collection."""
        self.etude.log_progress(run_id, metrics, output_dir)


class EtudeTrainerAdapter(TrainerAdapter):
    """A trainer adapter of Etude's, by the toolkit's interface."""

    def __init__(self, adapter_config: EtudeTrainerAdapterConfig) -> None:
        super().__init__(adapter_config)
        self._etude: trainer_adapter.TrainerAdapter | None = None

    @property
    def etude(self) -> trainer_adapter.TrainerAdapter:
        """The adapter that does the work. Raises RequestError before `etude_trainer` has started."""
        if self._etude is None:
            raise RequestError(
                "`etude_trainer_adapter` works within a trainer of `_type: etude_trainer` alone"
            )
        return self._etude

    def bind(self, etude: trainer_adapter.TrainerAdapter) -> None:
        """Hand over the adapter that does the work."""
        self._etude = etude

    async def is_healthy(self) -> bool:
        """Whether the backend answers and could train now."""
        return await self.etude.is_healthy()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start a job. Submitting the same `run_id` again does not train twice."""
        ref = await self.etude.submit(from_toolkit(trajectories))
        if isinstance(ref, Skipped):
            kind = self.etude.adapter_config.type_name
            return skipped_to_toolkit(ref, trajectories.run_id, kind)
        return job_to_toolkit(ref)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """The state of a job."""
        return status_to_toolkit(await self.etude.status(job_from_toolkit(ref)))

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait until the job has ended, however it ends."""
        status = await self.etude.wait_until_complete(job_from_toolkit(ref), poll_interval)
        return status_to_toolkit(status)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Log the facts of a job."""
        self.etude.log_progress(job_from_toolkit(ref), metrics, output_dir)
