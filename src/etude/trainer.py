"""The interface of trainers: the loop that makes episodes into better weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from etude.adapters.capabilities import check_ages, check_method, check_tokens
from etude.adapters.trainer_adapter import TrainerAdapter
from etude.builders.trajectory_builder import TrajectoryBuilder
from etude.config.finetuning import CurriculumLearningConfig, FinetuneConfig, TrainerConfig
from etude.core.around import through_base, wrap_implementations
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.curriculum import apply, initial_state
from etude.epochs.bookkeeper import Bookkeeper
from etude.epochs.ledger import Ledger, rewards_of
from etude.epochs.metrics import interval, spread, validation_metrics
from etude.rewards.collections import within
from etude.runtime import Runtime


class Trainer(ABC):
    """Runs evaluations through the trajectory builder, and trains through the trainer adapter.

    A subclass needs the abstract methods alone. Its epochs, jobs and validations are journalled, checked and
    reported around them, so that its runs are shown, exported and resumed as those of `epochs` are. When a
    run is resumed, `run` is called again from the first epoch: what was done already comes from the journal.
    """

    journals_epochs: ClassVar[bool] = False
    """Whether the trainer records its epochs itself, as `EpochTrainer` does. All others leave it as it is."""

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
        # With two underscores: subclasses have attributes of their own.
        self.__ledger: Ledger | None = None
        self.__books: Bookkeeper | None = None
        self.__num_epochs = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have every implementation called through this class."""
        super().__init_subclass__(**kwargs)
        methods = ("initialize", "run", "run_epoch", "run_validation_evaluation", "log_progress")
        wrap_implementations(cls, *methods)

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

    async def around_initialize(
        self, proceed: Callable[..., Awaitable[None]], run_config: FinetuneConfig
    ) -> None:
        """Called for `initialize` of every subclass: check what it was given before, and its health after.

        Raises CapabilityError when the adapter cannot do what the builder makes data for, TrainingError when
        the backend is not healthy: nothing was sampled by then.
        """
        if self.trajectory_builder is None or self.trainer_adapter is None:
            await proceed(run_config)
            return
        self.__check_capabilities(run_config)
        if self._runtime is None:
            await proceed(run_config)
            return
        ledger = self.__open_books(self._runtime, run_config)
        await proceed(run_config)
        await ledger.take_up()

    def __check_capabilities(self, run_config: FinetuneConfig) -> None:
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

    def __open_books(self, runtime: Runtime, run_config: FinetuneConfig) -> Ledger:
        builder, adapter = self.trajectory_builder, self.trainer_adapter
        ledger = self.__ledger = self._make_ledger(runtime, run_config)
        self._runtime = replace(runtime, evaluation=ledger.collections)
        builder.bind_runtime(self._runtime, built=ledger.built)
        if self.journals_epochs:
            adapter.bind_jobs(ledger)
        else:
            self.__books = Bookkeeper(
                ledger, runtime.progress, self.get_curriculum_state, lambda: self._curriculum_facts
            )
            adapter.bind_jobs(self.__books)
        return ledger

    def _make_ledger(self, runtime: Runtime, run_config: FinetuneConfig) -> Ledger:
        """What the parts of the trainer go through; of several targets, each has its own."""
        return Ledger(runtime, run_config, self.trajectory_builder, self.trainer_adapter)

    @through_base
    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the trainer, then the builder, then the adapter."""
        self.run_config = run_config
        self.trainer_config.reward = run_config.reward_function
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = initial_state(run_config.curriculum_learning)
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

    async def around_run_epoch(
        self,
        proceed: Callable[..., Awaitable[TrainingJobRef | Skipped]],
        epoch: int,
        run_id: str,
    ) -> TrainingJobRef | Skipped:
        """Called for `run_epoch` of every subclass: what is collected and submitted in it is the epoch's."""
        if self.__ledger is None:
            return await proceed(epoch, run_id)
        number = epoch if self.__books is None else self.__books.entered(epoch, self.__num_epochs)
        if self.__books is not None:
            self._curriculum_facts = {}
        with self.__ledger.working_on(number):
            outcome = await proceed(epoch, run_id)
            if self.__books is not None:
                await self.__books.left(number, outcome)
        return outcome

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs; the final statuses of all training jobs, in order.

        Raises TrainingError when a job failed or nothing was trained on at all.
        """

    async def around_run(
        self, proceed: Callable[..., Awaitable[list[TrainingJobStatus]]], num_epochs: int
    ) -> list[TrainingJobStatus]:
        """Called for `run` of every subclass: report its beginning and its end."""
        if self.__books is None or self.__ledger is None:
            return await proceed(num_epochs)
        self.__num_epochs = num_epochs
        self.runtime.progress.run_started(self.runtime.run.name, num_epochs, self.__ledger.describe())
        statuses = await proceed(num_epochs)
        await self.__books.finish(statuses)
        return statuses

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The metrics of a training run so far."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Free what the trainer and its components hold."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record the metrics of an epoch, in `output_dir` when one is given."""

    def around_log_progress(
        self,
        proceed: Callable[..., None],
        epoch: int,
        metrics: dict[str, Any],
        output_dir: str | None = None,
    ) -> None:
        """Called for `log_progress` of every subclass: the metrics go into the run's files too."""
        if self.__ledger is not None:
            self.__ledger.record.add_metrics(epoch, metrics)
        proceed(epoch, metrics, output_dir=output_dir)
        if self.__ledger is not None and self.__books is not None:
            self.__ledger.record.report()

    async def around_run_validation_evaluation(
        self, proceed: Callable[..., Awaitable[dict[str, Any]]], epoch: int, run_id: str
    ) -> dict[str, Any]:
        """Called for `run_validation_evaluation` of every subclass: record what was measured."""
        if self._runtime is not None and not (self.__books and self.__books.is_validated):
            self._runtime.progress.phase("validating", len(self._runtime.validation_examples))
        if self.__books is None:
            with within("validation", epoch):
                return await proceed(epoch, run_id)
        with within("validation", self.__books.epochs_done):
            metrics = await proceed(epoch, run_id)
        await self.__books.validated(metrics)
        return metrics

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
        """The groups to train on in this epoch, by `etude.curriculum`; override it for another curriculum.

        An override keeps its state in `self._curriculum_state`, as JSON: it is journalled with the
        epoch and put back when the run is resumed.
        """
        config = self.curriculum_config or CurriculumLearningConfig()
        groups, self._curriculum_state, self._curriculum_facts = apply(
            trajectory_collection.trajectories,
            self._curriculum_state or initial_state(config),
            config,
            self.run_config.seed,
            epoch,
        )
        return trajectory_collection.model_copy(update={"trajectories": groups})

    def get_curriculum_state(self) -> dict[str, Any]:
        """The curriculum's state and config, as JSON."""
        state = dict(self._curriculum_state or {})
        if "included_groups" in state:
            state["included_groups"] = sorted(state["included_groups"])
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


def _type_of(component: TrajectoryBuilder | TrainerAdapter) -> str:
    """The component's `_type` in quotes, or its class."""
    if isinstance(component, TrainerAdapter):
        name = component.adapter_config.type_name
    else:
        name = component.trajectory_builder_config.type_name
    return f"'{name}'" if name else type(component).__name__
