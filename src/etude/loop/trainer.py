"""The interface of trainers: the loop that makes episodes into better weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, TrainerConfig
from etude.core.around import through_base
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.loop.curriculum import apply, as_json, initial_state, with_sets
from etude.loop.ledger import rewards_of
from etude.loop.metrics import interval, spread, validation_metrics
from etude.loop.seam import TrainerSeam


class Trainer(TrainerSeam):
    """Runs evaluations through the trajectory builder, and trains through the trainer adapter.

    A subclass needs the abstract methods alone. Its epochs, jobs and validations are journalled, checked and
    reported around them (`TrainerSeam`), so that its runs are shown, exported and resumed as those of
    `epochs` are. When a run is resumed, `run` is called again from the first epoch: what was done already
    comes from the journal.
    """

    run_config: FinetuneConfig
    """The `finetuning` block, from `initialize` on."""
    trajectory_builder: TrajectoryBuilder
    """Set by `bind_components`."""
    trainer_adapter: TrainerAdapter
    """Set by `bind_components`."""

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        """Keep the config. Nothing is started here; further keywords are for subclasses."""
        self.trainer_config = trainer_config
        self.run_config = None  # type: ignore[assignment]  # the seed interface starts these as None
        self.trajectory_builder = None  # type: ignore[assignment]
        self.trainer_adapter = None  # type: ignore[assignment]
        self.curriculum_config: CurriculumLearningConfig | None = None
        self._curriculum_state: dict[str, Any] | None = None
        self._curriculum_facts: dict[str, Any] = {}

    @through_base
    async def bind_components(
        self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter
    ) -> None:
        """Hand over the two components that the trainer works with, before `initialize`."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    @through_base
    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the trainer, then the builder, then the adapter."""
        self.run_config = run_config
        self.trainer_config.reward = run_config.reward_function
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = with_sets(initial_state(run_config.curriculum_learning))
        await self.trajectory_builder.initialize(run_config)
        await self.trainer_adapter.initialize(run_config)

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | Skipped:
        """Collect the episodes of one epoch and submit them.

        Args:
            epoch: from 0.
            run_id: names the training run.

        Returns the submitted job, or Skipped when there was nothing to train on.
        """

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs; the final statuses of all training jobs, in order.

        Raises TrainingError when a job failed or nothing was trained on at all.
        """

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The metrics of a training run so far."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Free what the trainer and its components hold."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record the metrics of an epoch, in `output_dir` when one is given."""

    @through_base
    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Run the workflow once on each validation example; the metrics of the rewards.

        The builder's `run_eval` does it, with the validation examples in place of its own. Raises
        RequestError when there are none, ErrorBudgetExceeded when too many episodes fail: a failed validation
        is no reward of zero.
        """
        builder = self.trajectory_builder
        if self._runtime is not None and not self._runtime.validation_examples:
            raise RequestError(
                "there are no examples to validate on; name a file as "
                "'finetuning.run_configuration.validation_dataset'"
            )
        with self._validating():
            output = await builder.run_eval()
        metrics = self._calculate_validation_metrics(output)
        if type(builder).compute_reward is not TrajectoryBuilder.compute_reward:
            # The same figure as in training: the reward as the builder shapes it.
            items = output.results_of(self._reward_name())
            rewards = await rewards_of(builder, items, {"epoch": epoch, "run_id": run_id})
            metrics |= {**spread(rewards), **interval(rewards)}
        return metrics | {"epoch": epoch, "dataset_type": "validation"}

    def _calculate_validation_metrics(self, eval_output: EvaluationRunOutput) -> dict[str, Any]:
        """`avg_reward`, `min_reward`, `max_reward`, `num_examples` and what goes with them.

        Raises EtudeError when there is no reward function.
        """
        return validation_metrics(eval_output, self._reward_name())

    def _reward_name(self) -> str:
        if self.run_config.reward_function is None:
            raise EtudeError("no reward function: name an evaluator under 'finetuning.reward_function.name'")
        return self.run_config.reward_function.name

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups to train on in this epoch, by `etude.loop.curriculum`; override it for another one.

        An override keeps its state in `self._curriculum_state`, as JSON; what is a set there from
        `initialize` on may stay one. It is journalled with the epoch and put back when the run is resumed.
        """
        config = self.curriculum_config or CurriculumLearningConfig()
        groups, state, self._curriculum_facts = apply(
            trajectory_collection.trajectories,
            as_json(self._curriculum_state or initial_state(config)),
            config,
            self.run_config.seed,
            epoch,
        )
        self._curriculum_state = with_sets(state)
        return trajectory_collection.model_copy(update={"trajectories": groups})

    def get_curriculum_state(self) -> dict[str, Any]:
        """The curriculum's state and config, as JSON."""
        state = as_json(self._curriculum_state or {})
        config = self.curriculum_config
        return state | {"config": None if config is None else config.model_dump(mode="json")}

    @contextmanager
    def _validating(self) -> Iterator[None]:
        """The builder sees the validation examples, in its runtime and in its config."""
        builder, config = self.trajectory_builder, self.run_config
        settings = config.run_configuration
        held_out = settings.model_copy(update={"dataset": settings.validation_dataset})
        builder.run_config = config.model_copy(update={"run_configuration": held_out})
        if self._runtime is not None:
            examples = self._runtime.validation_examples
            builder.bind_runtime(replace(self._runtime, examples=examples))
        try:
            yield
        finally:
            builder.run_config = config
            if self._runtime is not None:
                builder.bind_runtime(self._runtime)
