"""The plug-in that registers Etude with the toolkit, through the entry point `nat.components`.

It registers a trajectory builder, a trainer adapter, and a trainer that makes `nat finetune` an Etude run.
torch and the learner are loaded when a run is opened, not on import.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn

from nat.builder.builder import Builder
from nat.cli.register_workflow import register_trainer, register_trainer_adapter, register_trajectory_builder
from nat.data_models.finetuning import (
    FinetuneConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryBuilderConfig,
)
from nat.finetuning import Trainer, TrainerAdapter, TrajectoryBuilder
from nat.runtime.loader import load_config
from pydantic import ConfigDict, Field

import etude.integrations.nat.agent  # noqa: F401 - registers the model that is trained
from etude.config.schema import Config
from etude.core.errors import EtudeError, RequestError
from etude.core.job import Skipped
from etude.integrations.nat.evaluation import job_to_toolkit, status_to_toolkit
from etude.integrations.nat.run import logger, open_run, translate
from etude.loop.recording_wrappers import RecordedTrainer, assemble_trainer
from etude.runtime import open_runtime
from etude.show.metrics_files import write_metrics
from etude.show.progress import LineProgress


class EtudeTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="etude_traj_builder"):
    """Collect episodes with Etude's recorder."""

    model_config = ConfigDict(extra="forbid")

    builder: dict[str, Any] = Field(
        default_factory=dict, description="An entry of Etude's `trajectory_builders`; by default `grpo`."
    )


class EtudeTrainerAdapterConfig(TrainerAdapterConfig, name="etude_trainer_adapter"):
    """Train with one of Etude's backends."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    adapter: dict[str, Any] = Field(
        default_factory=dict, description="An entry of Etude's `trainer_adapters`; by default `local`."
    )
    model: dict[str, Any] = Field(
        default_factory=dict,
        description="More keys of the trained model, as Etude's `llms` have them: its device, its provider.",
    )


class EtudeTrainerConfig(TrainerConfig, name="etude_trainer"):
    """Etude's training loop, with the options that the toolkit's `finetuning` lacks."""

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


def _refuse(self: Any, *_arguments: Any, **_options: Any) -> NoReturn:
    """Raise RequestError: the trainer runs Etude's own parts."""
    raise RequestError(f"`{self.called}` works only within a trainer of `_type: etude_trainer`")


class EtudeTrajectoryBuilder(TrajectoryBuilder):
    """The holder of the options of Etude's trajectory builder, which `etude_trainer` makes and runs."""

    called = "etude_traj_builder"
    run_eval = start_run = finalize = log_progress = _refuse


class EtudeTrainerAdapter(TrainerAdapter):
    """The holder of the options of Etude's trainer adapter, which `etude_trainer` makes and runs."""

    called = "etude_trainer_adapter"
    is_healthy = submit = status = wait_until_complete = log_progress = _refuse


class EtudeTrainer(Trainer):
    """A trainer that runs Etude's loop in a run folder. Repeating the command resumes a stopped run."""

    def __init__(self, trainer_config: EtudeTrainerConfig, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._config: Config | None = None
        self._open = AsyncExitStack()
        self._etude: RecordedTrainer | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Check the config. Nothing is opened yet, because the toolkit closes its own workflow after this.

        Raises RequestError for components that are not Etude's, and for unsupported options.
        """
        for key, wanted in (
            ("trajectory_builder", EtudeTrajectoryBuilder),
            ("trainer_adapter", EtudeTrainerAdapter),
        ):
            if not isinstance(given := getattr(self, key), wanted):
                raise RequestError(
                    f"finetuning.{key} is a {type(given).__name__}, and `etude_trainer` works with tokens as "
                    f"Etude records them: name an entry of `{key}s` with `_type: {wanted.called}`"
                )
        await super().initialize(run_config)
        file = run_config.run_configuration.config_file
        toolkit_config = load_config(file) if isinstance(file, str | Path) else file
        self._config = translate(toolkit_config, run_config)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, including the finished epochs of a resumed run.

        Raises TrainingError if a job failed or nothing was trained on, and other EtudeErrors.
        """
        etude = await self._trainer()
        statuses = await etude.run(num_epochs)
        run = etude.runtime.run.path
        logger.info("trained in %s; look at it with: etude runs show %s", run, shlex.quote(str(run)))
        return [status_to_toolkit(status) for status in statuses]

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Collect and submit one epoch. The metadata of a job without training data has `skipped`."""
        etude = await self._trainer()
        job = await etude.run_epoch(epoch, run_id) or Skipped(reason="nothing was submitted")
        return job_to_toolkit(job, run_id, "etude")

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Return the summary, epochs and validations of the run. Ignores `run_id`."""
        etude = await self._trainer()
        return await etude.get_metrics(etude.runtime.run.name)

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Run the held-out examples. A failed validation raises instead of returning an average of 0.0."""
        return await (await self._trainer()).run_validation_evaluation(epoch, run_id)

    def get_curriculum_state(self) -> dict[str, Any]:
        """Return the curriculum's state and config as JSON."""
        return self._require_trainer().get_curriculum_state()

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Write the metrics files into the run folder or `output_dir`."""
        self._require_trainer().log_progress(epoch, metrics, output_dir)

    async def cleanup(self) -> None:
        """Close the run and its resources. Calling it twice is fine."""
        self._etude = None
        await self._open.aclose()

    def _require_trainer(self) -> RecordedTrainer:
        if self._etude is None:
            raise EtudeError("no run is open; call run(num_epochs) or run_epoch(epoch, run_id) first")
        return self._etude

    async def _trainer(self) -> RecordedTrainer:
        """Return Etude's trainer. The first call opens its run folder."""
        if self._etude is None:
            if self._config is None:
                raise EtudeError("the trainer was not initialized; call initialize(run_config) first")
            async with AsyncExitStack() as stack:
                run = await stack.enter_async_context(open_run(self._config))
                logger.info("the run folder is %s", run.path)
                opened = open_runtime(self._config, run, progress=LineProgress(), report=write_metrics)
                etude = await assemble_trainer(await stack.enter_async_context(opened))
                assert isinstance(etude, RecordedTrainer)  # The toolkit trains one model.
                stack.push_async_callback(etude.cleanup)
                await etude.initialize(run_config=self._config.finetuning)
                self._etude, self._open = etude, stack.pop_all()
        return self._etude


def _register(register: Callable[..., Any], config_type: type, part: Callable[[Any], Any]) -> None:
    async def component(config: Any, builder: Builder) -> AsyncIterator[Any]:
        """Yield a part without resources: the toolkit closes it before training starts."""
        yield part(config)

    register(config_type=config_type)(component)


_register(register_trajectory_builder, EtudeTrajectoryBuilderConfig, EtudeTrajectoryBuilder)
_register(register_trainer_adapter, EtudeTrainerAdapterConfig, EtudeTrainerAdapter)
_register(register_trainer, EtudeTrainerConfig, EtudeTrainer)
