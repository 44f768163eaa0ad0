"""The toolkit's trainer `etude_trainer`: a run of Etude's behind `nat finetune`."""

from __future__ import annotations

import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nat.data_models.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryCollection,
)
from nat.finetuning import Trainer
from nat.runtime.loader import load_config

from etude.config.schema import Config
from etude.core.errors import EtudeError, RequestError
from etude.core.job import Skipped
from etude.integrations.nat.evaluation import (
    from_toolkit,
    job_to_toolkit,
    skipped_to_toolkit,
    status_to_toolkit,
    to_toolkit,
)
from etude.integrations.nat.parts import EtudeTrainerAdapter, EtudeTrainerConfig, EtudeTrajectoryBuilder
from etude.integrations.nat.run import etude_config, logged_progress, logger, run_of
from etude.loop import interface as trainer
from etude.loop.targets import assemble_trainer
from etude.report.files import RunReport
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder


class EtudeTrainer(Trainer):
    """Trains epoch by epoch in a run folder. The same command again goes on with a run that was stopped."""

    def __init__(self, trainer_config: EtudeTrainerConfig, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._config: Config | None = None
        self._open = AsyncExitStack()
        self._etude: trainer.Trainer | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Check all that was asked for. Nothing is opened: the toolkit closes its own workflow after this.

        Raises RequestError for what cannot be done.
        """
        if not isinstance(self.trajectory_builder, EtudeTrajectoryBuilder):
            raise _not_ours("trajectory_builder", "etude_traj_builder", self.trajectory_builder)
        if not isinstance(self.trainer_adapter, EtudeTrainerAdapter):
            raise _not_ours("trainer_adapter", "etude_trainer_adapter", self.trainer_adapter)
        await super().initialize(run_config)
        given = run_config.run_configuration.config_file
        toolkit_config = load_config(given) if isinstance(given, str | Path) else given
        self._config = etude_config(toolkit_config, run_config)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, those of a run that was stopped included.

        Raises TrainingError when a job failed or nothing was trained on, and other EtudeErrors.
        """
        etude = await self._opened()
        statuses = await etude.run(num_epochs)
        run = etude.runtime.run.path
        logger.info("trained in %s; look at it with: etude runs show %s", run, shlex.quote(str(run)))
        return [status_to_toolkit(status) for status in statuses]

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Collect and submit one epoch. The job of an epoch without training data says `skipped`."""
        job = await (await self._opened()).run_epoch(epoch, run_id) or Skipped(reason="nothing was submitted")
        if isinstance(job, Skipped):
            return skipped_to_toolkit(job, run_id, "etude")
        return job_to_toolkit(job)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The summary, epochs and validations of the run; `run_id` is its name or that of a job."""
        etude = await self._opened()
        return await etude.get_metrics(etude.runtime.run.name)

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Run the held-out examples. A validation that fails raises, and is no average of 0.0."""
        return await (await self._opened()).run_validation_evaluation(epoch, run_id)

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups to train on in this epoch."""
        etude = self._running()
        return to_toolkit(etude.apply_curriculum_learning(from_toolkit(trajectory_collection), epoch))

    def get_curriculum_state(self) -> dict[str, Any]:
        """The curriculum's state and config, as JSON."""
        return self._running().get_curriculum_state()

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Write the metrics files: into the run folder, or `output_dir`."""
        self._running().log_progress(epoch, metrics, output_dir)

    async def cleanup(self) -> None:
        """Close the run and all that it holds. Calling it twice is fine."""
        self._etude = None
        await self._open.aclose()

    def _running(self) -> trainer.Trainer:
        if self._etude is None:
            raise EtudeError("no run is open; call run(num_epochs) or run_epoch(epoch, run_id) first")
        return self._etude

    async def _opened(self) -> trainer.Trainer:
        """Etude's trainer in its run folder, opened the first time."""
        if self._etude is None:
            if self._config is None:
                raise EtudeError("the trainer was not initialized; call initialize(run_config) first")
            async with AsyncExitStack() as stack:
                run = stack.enter_context(run_of(self._config))
                self._etude = await self._assembled(self._config, run, stack)
                self._open = stack.pop_all()
        return self._etude

    async def _assembled(self, config: Config, run: RunFolder, stack: AsyncExitStack) -> trainer.Trainer:
        logger.info("the run folder is %s", run.path)
        opened = open_runtime(config, run, progress=logged_progress(), report=RunReport())
        etude = await assemble_trainer(await stack.enter_async_context(opened))
        stack.push_async_callback(etude.cleanup)
        await etude.initialize(run_config=config.finetuning)
        self.trajectory_builder.bind(etude.trajectory_builder)
        self.trainer_adapter.bind(etude.trainer_adapter)
        return etude


def _not_ours(key: str, wanted: str, given: object) -> RequestError:
    return RequestError(
        f"finetuning.{key} is a {type(given).__name__}, and `etude_trainer` works with tokens as Etude "
        f"records them: name an entry of `{key}s` with `_type: {wanted}`"
    )
