"""The interface of trainers, and what happens around the methods of every subclass, whoever wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, ClassVar

from etude.algorithms.algorithm import kind_of
from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.capabilities import (
    check_block,
    check_method,
    check_opponents,
    check_options,
    check_tokens,
)
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.component import ComponentConfig
from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, TrainerConfig
from etude.core.data_model import finite
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.implementations import through_base, wrap_implementations
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus
from etude.core.trajectory import TrajectoryCollection
from etude.loop.bookkeeper import Bookkeeper
from etude.loop.curriculum import apply_curriculum, initial_state, with_sets
from etude.loop.follower import Follower
from etude.loop.lifecycle import recover
from etude.loop.metrics import reward_metrics, validation_metrics
from etude.loop.warm_up import warm_up
from etude.rewards.collections import within
from etude.runtime import Runtime


class TrainerSeam(ABC):
    """The base of `Trainer`: each method of a subclass is called through `around_<method>` of this class.

    A subclass may take more or fewer arguments than the interface has: what it is called with goes on to it.
    Attributes have two underscores here, because subclasses have attributes of their own.
    """

    journals_epochs: ClassVar[bool] = False
    """Whether the trainer tells its bookkeeper of its epochs, as `EpochTrainer` does. All others leave it as
    it is, and a `Follower` keeps the books."""

    run_config: FinetuneConfig
    """The `finetuning` block, from `initialize` on."""
    trajectory_builder: TrajectoryBuilder
    """Set by `bind_components`."""
    _runtime: Runtime | None = None
    _curriculum_facts: dict[str, Any]
    __parts: tuple[TrajectoryBuilder, TrainerAdapter] | None = None
    __books: Bookkeeper | None = None
    __num_epochs: int = 0

    @abstractmethod
    def get_curriculum_state(self) -> dict[str, Any]:
        """The curriculum's state and config, as JSON."""

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
        """The record of the epochs. Raises EtudeError before `initialize`, and without a runtime."""
        if self.__books is None:
            raise EtudeError("the trainer was not initialized; call initialize(run_config) first")
        return self.__books

    @property
    def __follower(self) -> Follower | None:
        return self.__books if isinstance(self.__books, Follower) else None

    async def around_bind_components(
        self,
        proceed: Callable[..., Awaitable[None]],
        trajectory_builder: TrajectoryBuilder,
        trainer_adapter: TrainerAdapter,
    ) -> None:
        """Know the components, whatever the trainer makes of them."""
        self.__parts = (trajectory_builder, trainer_adapter)
        await proceed(trajectory_builder=trajectory_builder, trainer_adapter=trainer_adapter)

    async def around_initialize(
        self, proceed: Callable[..., Awaitable[None]], run_config: FinetuneConfig
    ) -> None:
        """Check what the trainer was given before, and its health after.

        Raises CapabilityError when the adapter cannot do what the builder makes data for, TrainingError when
        the backend is not healthy: nothing was sampled by then.
        """
        if self.__parts is not None:
            (builder, adapter), runtime = self.__parts, self._runtime
            backend, capabilities = _type_of(adapter, adapter.adapter_config), adapter.capabilities()
            for method in builder.methods:
                check_method(
                    backend, capabilities, method, _type_of(builder, builder.trajectory_builder_config)
                )
            check_options(backend, capabilities, builder.trajectory_builder_config)
            check_block(backend, capabilities, run_config)
            needing = {*builder.methods, *map(kind_of, builder.methods)} & capabilities.token_ids_for
            builder.token_ids_required = bool(needing)
            if runtime is not None and runtime.target_model in runtime.config.llms:
                target = runtime.target_model
                check_tokens(backend, capabilities, builder.methods, runtime.config.llms[target], target)
                check_opponents(backend, capabilities, runtime.config.llms, target)
            if runtime is not None:
                kind, facts = Bookkeeper if self.journals_epochs else Follower, lambda: self._curriculum_facts
                self.__books = books = kind(
                    runtime, run_config, builder, adapter, self.get_curriculum_state, facts
                )
                self._runtime = replace(runtime, evaluation=books.collections)
                builder.bind_runtime(self._runtime)
                builder.bind_built(books.built)
                adapter.bind_jobs(books)
        if self.__books is not None:
            await recover(self.__books)
        await proceed(run_config)
        if self.__books is not None:
            await self.__books.take_up()

    def __require_parts(self) -> None:
        """Raise EtudeError before `bind_components` and `initialize`."""
        if self.__parts is None and self.trajectory_builder is None and self.run_config is None:
            raise _not_ready(self, "bind_components(trajectory_builder, trainer_adapter)")
        if self.__books and self.__parts and self.run_config is self.__parts[0].run_config is None:
            raise _not_ready(self, "super().initialize(run_config) in `initialize`, and await it,")

    async def around_run_epoch(
        self,
        proceed: Callable[..., Awaitable[TrainingJobRef | Skipped | None]],
        epoch: int,
        *args: Any,
        **kwargs: Any,
    ) -> TrainingJobRef | Skipped | None:
        """Count to the epoch all that is collected and submitted in it."""
        self.__require_parts()
        if self.__books is None:
            return await proceed(epoch, *args, **kwargs)
        follower, number = self.__follower, epoch
        if follower is not None:
            number, self._curriculum_facts = await follower.entered(epoch, self.__num_epochs), {}
        with self.__books.working_on(number):
            outcome = await proceed(epoch, *args, **kwargs)
            if follower is not None:
                await follower.left(number, outcome)
        return outcome

    async def around_run(
        self, proceed: Callable[..., Awaitable[list[TrainingJobStatus]]], num_epochs: int
    ) -> list[TrainingJobStatus]:
        """Report the beginning and the end of a trainer's run."""
        self.__require_parts()
        if (follower := self.__follower) is None:
            return await proceed(num_epochs)
        self.__num_epochs = num_epochs
        self.runtime.progress.run_started(self.runtime.run.name, num_epochs, follower.describe())
        await warm_up(follower)
        statuses = await follower.statuses_of(lambda: proceed(num_epochs))
        await follower.settled(type(self).__name__, statuses)
        follower.finish()
        return statuses

    def around_log_progress(
        self, proceed: Callable[..., None], epoch: int, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """The metrics go into the run's files too."""
        if self.__books is not None:
            self.__books.record.add_metrics(epoch, metrics)
        proceed(epoch, metrics, *args, **kwargs)
        if self.__follower is not None:
            self.__follower.record.report()

    async def around_cleanup(self, proceed: Callable[..., Awaitable[None]]) -> None:
        """Nobody goes on collecting; the components are freed, whatever one of them raises."""
        async with AsyncExitStack() as exits:
            for component in reversed(self.__parts or ()):
                exits.push_async_callback(component.cleanup)
            if self.__books is not None:
                exits.push_async_callback(self.__books.collections.stop)
            await proceed()

    async def around_run_validation_evaluation(
        self, proceed: Callable[..., Awaitable[dict[str, Any]]], epoch: int, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Record what was measured."""
        self.__require_parts()
        follower = self.__follower
        number = epoch if follower is None else follower.epochs_done
        if self._runtime is not None and not (follower and follower.record.is_validated(number)):
            self._runtime.progress.phase("validating", len(self._runtime.validation_examples))
        with within("validation", number) if number != BASE else within("warm-up", 0):
            metrics = await proceed(epoch, *args, **kwargs)
        if follower is not None:
            await follower.validated(number, {**metrics, "epoch": number})
        return metrics


def _not_ready(trainer: TrainerSeam, call: str) -> EtudeError:
    return EtudeError(f"{type(trainer).__name__} is not ready for this: call {call} first")


def _type_of(component: object, config: ComponentConfig) -> str:
    return f"'{config.type_name}'" if config.type_name else type(component).__name__


BASE = -1
"""In place of an epoch: the validation of the base model, before a warm-up."""


class Trainer(TrainerSeam):
    """Runs evaluations through the trajectory builder, and trains through the trainer adapter.

    A subclass needs the abstract methods alone. Its epochs, jobs and validations are journalled, checked and
    reported around them (`TrainerSeam`), so that its runs are shown, exported and resumed as those of
    `epochs` are. When a run is resumed, `run` is called again from the first epoch: what was done already
    comes from the journal.
    """

    trainer_adapter: TrainerAdapter
    """Set by `bind_components`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have every implementation called through `TrainerSeam`, and held to the interface."""
        super().__init_subclass__(**kwargs)
        # What a subclass hands to `super().log_progress` is logged too.
        wrap_implementations(cls, Trainer, nested=["log_progress"])

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
        """Prepare the trainer, the builder, then the adapter. Raises EtudeError before `bind_components`."""
        if self.trajectory_builder is None or self.trainer_adapter is None:
            raise _not_ready(self, "bind_components(trajectory_builder, trainer_adapter)")
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
        builder, config = self.trajectory_builder, self._block
        if self._runtime is not None and not self._runtime.validation_examples:
            key = "finetuning.run_configuration.validation_dataset"
            raise RequestError(f"there are no examples to validate on; name a file as '{key}'")
        settings = config.run_configuration
        held_out = settings.model_copy(update={"dataset": settings.validation_dataset})
        # The builder sees the validation examples, in its runtime and in its config.
        builder.run_config = config.model_copy(update={"run_configuration": held_out})
        if self._runtime is not None:
            examples = self._runtime.validation_examples
            builder.bind_runtime(replace(self._runtime, examples=examples))
        try:
            output = await builder.run_eval()
        finally:
            builder.run_config = config
            if self._runtime is not None:
                builder.bind_runtime(self._runtime)
        metrics = self._calculate_validation_metrics(output)
        if type(builder).compute_reward is not TrajectoryBuilder.compute_reward:
            # The same figure as in training: the reward as the builder shapes it.
            items = output.results_of(self._reward_name())
            meta = {"epoch": epoch, "run_id": run_id}
            rewards = [await builder.compute_reward(item, meta) for item in items if item.is_scored]
            if rewards != output.scores()[self._reward_name()]:
                metrics |= reward_metrics(rewards)
        return metrics | {"epoch": epoch, "dataset_type": "validation"}

    def _calculate_validation_metrics(self, eval_output: EvaluationRunOutput) -> dict[str, Any]:
        """`avg_reward`, `min_reward`, `max_reward`, `num_examples` and what goes with them.

        Raises EtudeError when there is no reward function.
        """
        return validation_metrics(eval_output, self._reward_name())

    def _reward_name(self) -> str:
        if (reward := self._block.reward_function) is None:
            raise EtudeError("no reward function: name an evaluator under 'finetuning.reward_function.name'")
        return reward.name

    @property
    def _block(self) -> FinetuneConfig:
        """The `finetuning` block. Raises EtudeError before `initialize`."""
        if self.run_config is None:
            raise _not_ready(self, "initialize(run_config)")
        return self.run_config

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups to train on in this epoch, by `etude.loop.metrics`; override it for another one.

        An override keeps its state in `self._curriculum_state`, as JSON; what is a set there from
        `initialize` on may stay one. It is journalled with the epoch and put back when the run is resumed.
        """
        config = self.curriculum_config or CurriculumLearningConfig()
        groups, state, self._curriculum_facts = apply_curriculum(
            trajectory_collection.trajectories,
            finite(self._curriculum_state or initial_state(config)),
            config,
            self._block.seed,
            epoch,
        )
        self._curriculum_state = with_sets(state)
        return trajectory_collection.model_copy(update={"trajectories": groups})

    def get_curriculum_state(self) -> dict[str, Any]:
        """The curriculum's state and config, as JSON."""
        state: dict[str, Any] = finite(self._curriculum_state or {})
        config = self.curriculum_config
        return state | {"config": None if config is None else config.model_dump(mode="json")}
