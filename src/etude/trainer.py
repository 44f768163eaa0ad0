"""The interface of trainers: the loop that makes episodes into better weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from etude.adapters.capabilities import check_ages, check_method, check_tokens
from etude.adapters.trainer_adapter import TrainerAdapter
from etude.builders.trajectory_builder import TrajectoryBuilder
from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, TrainerConfig
from etude.core.errors import EtudeError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.curriculum import apply, as_json, initial_state, with_sets
from etude.epochs.metrics import validation_metrics
from etude.runtime import Runtime


class Trainer(ABC):
    """Runs evaluations through the trajectory builder, and trains through the trainer adapter."""

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
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        """What is running. Raises EtudeError before `bind_runtime`."""
        if self._runtime is None:
            raise EtudeError(f"{type(self).__name__} has no runtime; call bind_runtime(runtime) first")
        return self._runtime

    def bind_runtime(self, runtime: Runtime) -> None:
        """Hand over what is running, before `initialize`."""
        self._runtime = runtime

    async def bind_components(
        self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter
    ) -> None:
        """Hand over the two components that the trainer works with, before `initialize`."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the trainer, then the builder, then the adapter.

        Raises CapabilityError when the adapter cannot do what the builder makes data for: nothing was
        sampled or loaded by then.
        """
        self.run_config = run_config
        self.trainer_config.reward = run_config.reward_function
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = with_sets(initial_state(run_config.curriculum_learning))
        builder, adapter = self.trajectory_builder, self.trainer_adapter
        capabilities = adapter.capabilities()
        for method in builder.methods:
            check_method(_type_of(adapter), capabilities, method, _type_of(builder))
        check_ages(_type_of(adapter), capabilities, run_config)
        builder.token_ids_required = bool(capabilities.token_ids_for.intersection(builder.methods))
        if self._runtime is not None:
            llm, target = self._runtime.config.llms, self._runtime.target_model
            if target in llm:
                check_tokens(_type_of(adapter), capabilities, builder.methods, llm[target], target)
            builder.bind_runtime(self._runtime)
        await builder.initialize(run_config)
        await adapter.initialize(run_config)

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

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Run the workflow once on each validation example; the metrics of the rewards.

        The builder's `run_eval` does it, with the validation examples in place of its own. Raises
        ErrorBudgetExceeded when too many episodes fail: a failed validation is no reward of zero.
        """
        with self._validating(epoch):
            output = await self.trajectory_builder.run_eval()
        return self._calculate_validation_metrics(output) | {"epoch": epoch, "dataset_type": "validation"}

    def _calculate_validation_metrics(self, eval_output: EvaluationRunOutput) -> dict[str, Any]:
        """`avg_reward`, `min_reward`, `max_reward`, `num_examples` and what goes with them.

        Raises EtudeError when there is no reward function.
        """
        if self.run_config.reward_function is None:
            raise EtudeError("no reward function: name an evaluator under 'finetuning.reward_function.name'")
        return validation_metrics(eval_output, self.run_config.reward_function.name)

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups to train on in this epoch, by `etude.curriculum`; override it for another curriculum.

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
    def _validating(self, epoch: int) -> Iterator[None]:
        """The builder sees the validation examples, in its runtime and in its config."""
        builder, config = self.trajectory_builder, self.run_config
        settings = config.run_configuration
        held_out = settings.model_copy(update={"dataset": settings.validation_dataset})
        builder.run_config = config.model_copy(update={"run_configuration": held_out})
        if self._runtime is not None:
            examples = self._runtime.validation_examples
            self._runtime.progress.phase("validating", len(examples))
            builder.bind_runtime(replace(self._runtime, examples=examples, phase=f"validation/{epoch}"))
        try:
            yield
        finally:
            builder.run_config = config
            if self._runtime is not None:
                builder.bind_runtime(self._runtime)


def _type_of(component: TrajectoryBuilder | TrainerAdapter) -> str:
    """The component's `_type` in quotes, or its class."""
    if isinstance(component, TrainerAdapter):
        name = component.adapter_config.type_name
    else:
        name = component.trajectory_builder_config.type_name
    return f"'{name}'" if name else type(component).__name__
