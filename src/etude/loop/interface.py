"""The interface of trainers, with the recording of methods that a trainer calls itself."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

from etude.algorithms.collecting import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, TrainerConfig
from etude.core.data_model import finite
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.interfaces import wrap_implementations
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus
from etude.core.sample import TrajectoryCollection
from etude.loop.bookkeeper import Bookkeeper
from etude.loop.curriculum import apply_curriculum, initial_state, with_sets
from etude.loop.metrics import reward_metrics, validation_metrics
from etude.rollout.phases import collecting_for, current_number
from etude.runtime import Runtime

Method: TypeAlias = Callable[..., Any]


def _recorded_epoch(run_epoch: Method) -> Method:
    """Wrap `run_epoch` of a followed trainer: everything collected and submitted in it counts for the epoch.

    Without a job, there was nothing to train on. If a trainer repeats a number, the epoch gets a new one.
    Raises RunStopped if an alarm has ended the run.
    """

    @functools.wraps(run_epoch)
    async def run_and_record(self: Trainer, epoch: int, *args: Any, **kwargs: Any) -> Any:
        books = self._books
        if books is None or current_number("train") is not None:  # Outside of a run, or called by `super()`.
            return await run_epoch(self, epoch, *args, **kwargs)
        number, self._curriculum_facts = await books.begin(epoch), {}
        with books.working_on(number):
            outcome = await run_epoch(self, epoch, *args, **kwargs)
            await books.end(number, outcome)
        return outcome

    return run_and_record


def _recorded_validation(validate: Method) -> Method:
    """Wrap a validation: its metrics are recorded with the weights that were measured."""

    @functools.wraps(validate)
    async def validate_and_record(self: Trainer, epoch: int, *args: Any, **kwargs: Any) -> Any:
        books = self._books
        is_within = (current_number("validation"), current_number("warm-up")) != (None, None)
        if books is None or is_within:  # Outside of a run, or called by `super()`.
            return await validate(self, epoch, *args, **kwargs)
        number = len(books.finished_epochs) if books.follows else epoch
        if not books.follows or books.history.validation(number) is None:
            self.runtime.progress.phase("validating", len(self.runtime.validation_examples))
        with collecting_for("validation", number):
            metrics = await validate(self, epoch, *args, **kwargs)
        if books.follows:
            await books.record_validation(number, {**metrics, "epoch": number})
        return metrics

    return validate_and_record


def _recorded_progress(log_progress: Method) -> Method:
    """Wrap `log_progress`: its metrics go to the run's files too, as do those that an override adds."""

    @functools.wraps(log_progress)
    def log_and_record(self: Trainer, epoch: int, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        books = self._books
        if books is not None:
            books.add_metrics(epoch, metrics)
        log_progress(self, epoch, metrics, *args, **kwargs)
        if books is not None and books.follows:
            books.report()

    return log_and_record


_RECORDED = {
    "run_epoch": _recorded_epoch,
    "run_validation_evaluation": _recorded_validation,
    "log_progress": _recorded_progress,
}
"""The methods that a trainer calls itself, where a wrapper around the trainer would not see the call."""


class Trainer(ABC):
    """Runs evaluations through the trajectory builder, and trains through the trainer adapter.

    A subclass only needs the abstract methods. In a run, its epochs, jobs and validations are journalled,
    checked and reported around it (`etude.loop.recording_wrappers`). So its runs are shown, exported and
    resumed like runs of `epochs`. A resumed run calls `run` again from the first epoch, and reads finished
    work from the journal.
    """

    journals_epochs: ClassVar[bool] = False
    """Whether the trainer records its own epochs, as `EpochTrainer` does. For other trainers, epochs are
    recorded from the jobs that they submit and ask after."""

    run_config: FinetuneConfig
    """The `finetuning` block, set by `initialize`."""
    trajectory_builder: TrajectoryBuilder
    """Set by `bind_components`."""
    trainer_adapter: TrainerAdapter
    """Set by `bind_components`."""
    _runtime: Runtime | None = None
    _books: Bookkeeper | None = None
    """Records the epochs; None outside of a run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check each implementation against the interface, and record the methods in `_RECORDED`."""
        super().__init_subclass__(**kwargs)
        wrap_implementations(cls, Trainer)
        names = _RECORDED.keys() & vars(cls).keys()
        for name in names - {"run_epoch"} if cls.journals_epochs else names:
            setattr(cls, name, _RECORDED[name](vars(cls)[name]))

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        """Keep the config. Nothing is started here; further keywords are for subclasses."""
        self.trainer_config = trainer_config
        self.run_config = None  # type: ignore[assignment]  # the seed interface starts these as None
        self.trajectory_builder = None  # type: ignore[assignment]
        self.trainer_adapter = None  # type: ignore[assignment]
        self.curriculum_config: CurriculumLearningConfig | None = None
        self._curriculum_state: dict[str, Any] | None = None
        self._curriculum_facts: dict[str, Any] = {}

    @property
    def runtime(self) -> Runtime:
        """The parts of the run. Raises EtudeError before `bind_runtime`."""
        if self._runtime is None:
            raise EtudeError(f"{type(self).__name__} has no runtime; call bind_runtime(runtime) first")
        return self._runtime

    def bind_runtime(self, runtime: Runtime) -> None:
        """Hand over the parts of the run, before `initialize`."""
        self._runtime = runtime

    @property
    def bookkeeper(self) -> Bookkeeper:
        """The record of the epochs. Raises EtudeError outside of a run, and before the run is initialized."""
        if self._books is None:
            raise EtudeError(f"{type(self).__name__} has no books yet: a run that is initialized keeps them")
        return self._books

    async def bind_components(
        self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter
    ) -> None:
        """Hand over the two components that the trainer works with, before `initialize`."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the trainer, the builder, then the adapter."""
        self.run_config = run_config
        self.trainer_config.reward = run_config.reward_function
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = with_sets(initial_state(run_config.curriculum_learning))
        await self.trajectory_builder.initialize(run_config)
        await self.trainer_adapter.initialize(run_config)

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | Skipped | None:
        """Collect the episodes of one epoch and submit them.

        Args:
            epoch: from 0.
            run_id: names the training run.

        Returns the submitted job; Skipped, or None, when there was nothing to train on.
        """

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs. Return the final statuses of all training jobs, in order.

        Raises TrainingError when a job failed or nothing was trained on at all.
        """

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Return the metrics of a training run so far."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Free the resources of the trainer and its components."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record the metrics of an epoch, in `output_dir` when one is given."""

    @_recorded_validation
    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Run the workflow once on each validation example, and return the metrics of the rewards.

        The builder's `run_eval` does this with the validation examples instead of its own. Raises
        RequestError when there are none, ErrorBudgetExceeded when too many episodes fail. A failed validation
        is not a reward of zero.
        """
        builder, config = self.trajectory_builder, self.run_config
        if self._runtime is not None and not self._runtime.validation_examples:
            key = "finetuning.run_configuration.validation_dataset"
            raise RequestError(f"there are no examples to validate on; name a file as '{key}'")
        settings = config.run_configuration
        held_out = settings.model_copy(update={"dataset": settings.validation_dataset})
        # The builder sees the validation examples, in its runtime and in its config.
        builder.run_config = config.model_copy(update={"run_configuration": held_out})
        if self._runtime is not None:
            builder.bind_runtime(replace(self._runtime, examples=self._runtime.validation_examples))
        try:
            output = await builder.run_eval()
        finally:
            builder.run_config = config
            if self._runtime is not None:
                builder.bind_runtime(self._runtime)
        metrics = self._calculate_validation_metrics(output)
        if builder.__class__.compute_reward is not TrajectoryBuilder.compute_reward:
            # The same figure as in training: the reward as the builder shapes it.
            reward = config.require_reward()
            items = output.evaluator_items(reward)
            meta = {"epoch": epoch, "run_id": run_id}
            rewards = [await builder.compute_reward(item, meta) for item in items if item.is_scored]
            if rewards != output.scores()[reward]:
                metrics |= reward_metrics(rewards)
        return metrics | {"epoch": epoch, "dataset_type": "validation"}

    def _calculate_validation_metrics(self, eval_output: EvaluationRunOutput) -> dict[str, Any]:
        """Return `avg_reward`, `min_reward`, `max_reward`, `num_examples` and related metrics.

        Raises RequestError when there is no reward function.
        """
        return validation_metrics(eval_output, self.run_config.require_reward())

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Return the groups to train on in this epoch, by `etude.loop.curriculum`. It may be overridden.

        An override keeps its state in `self._curriculum_state`, as JSON, with `included_groups` as a set. It
        is journalled with the epoch, and restored when the run is resumed.
        """
        config = self.curriculum_config or CurriculumLearningConfig()
        groups = trajectory_collection.groups
        selected, state, self._curriculum_facts = apply_curriculum(
            trajectory_collection.figures,
            finite(self._curriculum_state or initial_state(config)),
            config,
            self.run_config.seed,
            epoch,
        )
        self._curriculum_state = with_sets(state)
        kept = [[groups[index][unit] for unit in units] for index, units in selected.items()]
        return trajectory_collection.model_copy(update={"groups": kept})

    def get_curriculum_state(self) -> dict[str, Any]:
        """Return the curriculum's state and config, as JSON."""
        state: dict[str, Any] = finite(self._curriculum_state or {})
        config = self.curriculum_config
        return state | {"config": None if config is None else config.model_dump(mode="json")}
