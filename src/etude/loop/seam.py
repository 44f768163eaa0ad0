"""The seam of trainers: what happens around the methods of every subclass, whoever wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, ClassVar

from etude.algorithms.algorithm import kind_of
from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.capabilities import check_ages, check_method, check_options, check_tokens
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import FinetuneConfig
from etude.core.around import wrap_implementations
from etude.core.errors import EtudeError
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.skipped import Skipped
from etude.loop.bookkeeper import Bookkeeper
from etude.loop.ledger import Ledger
from etude.rewards.collections import within
from etude.runtime import Runtime


class TrainerSeam(ABC):
    """The base of `Trainer`: each method of a subclass is called through `around_<method>` of this class.

    A subclass may take more or fewer arguments than the interface has: what it is called with goes on to it.
    Attributes have two underscores here, because subclasses have attributes of their own.
    """

    journals_epochs: ClassVar[bool] = False
    """Whether the trainer records its epochs itself, as `EpochTrainer` does. All others leave it as it is."""

    _runtime: Runtime | None = None
    _curriculum_facts: dict[str, Any]
    __parts: tuple[TrajectoryBuilder, TrainerAdapter] | None = None
    __ledger: Ledger | None = None
    __books: Bookkeeper | None = None
    __num_epochs: int = 0

    @abstractmethod
    def get_curriculum_state(self) -> dict[str, Any]:
        """The curriculum's state and config, as JSON."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have every implementation called through this class."""
        super().__init_subclass__(**kwargs)
        wrap_implementations(
            cls,
            "bind_components",
            "initialize",
            "run",
            "run_epoch",
            "run_validation_evaluation",
            "log_progress",
            "cleanup",
        )

    @property
    def runtime(self) -> Runtime:
        """What is running. Raises EtudeError before `bind_runtime`."""
        if self._runtime is None:
            raise EtudeError(f"{type(self).__name__} has no runtime; call bind_runtime(runtime) first")
        return self._runtime

    def bind_runtime(self, runtime: Runtime) -> None:
        """Hand over what is running, before `initialize`."""
        self._runtime = runtime

    async def around_bind_components(
        self,
        proceed: Callable[..., Awaitable[None]],
        trajectory_builder: TrajectoryBuilder,
        trainer_adapter: TrainerAdapter,
    ) -> None:
        """Called for `bind_components` of every subclass, whatever it makes of the components."""
        self.__parts = (trajectory_builder, trainer_adapter)
        await proceed(trajectory_builder=trajectory_builder, trainer_adapter=trainer_adapter)

    async def around_initialize(
        self, proceed: Callable[..., Awaitable[None]], run_config: FinetuneConfig
    ) -> None:
        """Called for `initialize` of every subclass: check what it was given before, and its health after.

        Raises CapabilityError when the adapter cannot do what the builder makes data for, TrainingError when
        the backend is not healthy: nothing was sampled by then.
        """
        if self.__parts is None:
            await proceed(run_config)
            return
        self.__check_capabilities(run_config, *self.__parts)
        if self._runtime is None:
            await proceed(run_config)
            return
        ledger = self.__open_books(self._runtime, run_config, *self.__parts)
        await proceed(run_config)
        await ledger.take_up()

    def __check_capabilities(
        self, run_config: FinetuneConfig, builder: TrajectoryBuilder, adapter: TrainerAdapter
    ) -> None:
        capabilities = adapter.capabilities()
        for method in builder.methods:
            check_method(_type_of(adapter), capabilities, method, _type_of(builder))
        check_options(_type_of(adapter), capabilities, builder.trajectory_builder_config)
        check_ages(_type_of(adapter), capabilities, run_config)
        needing = {*builder.methods, *map(kind_of, builder.methods)} & capabilities.token_ids_for
        builder.token_ids_required = bool(needing)
        if self._runtime is not None:
            llm, target = self._runtime.config.llms, self._runtime.target_model
            if target in llm:
                check_tokens(_type_of(adapter), capabilities, builder.methods, llm[target], target)

    def __open_books(
        self,
        runtime: Runtime,
        run_config: FinetuneConfig,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
    ) -> Ledger:
        ledger = self.__ledger = self._make_ledger(runtime, run_config, builder, adapter)
        self._runtime = replace(runtime, evaluation=ledger.collections)
        builder.bind_runtime(self._runtime)
        builder.bind_built(ledger.built)
        if self.journals_epochs:
            adapter.bind_jobs(ledger)
        else:
            self.__books = Bookkeeper(
                ledger, runtime.progress, self.get_curriculum_state, lambda: self._curriculum_facts
            )
            adapter.bind_jobs(self.__books)
        return ledger

    def _make_ledger(
        self,
        runtime: Runtime,
        run_config: FinetuneConfig,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
    ) -> Ledger:
        """What the parts of the trainer go through; of several targets, each has its own."""
        return Ledger(runtime, run_config, builder, adapter)

    async def around_run_epoch(
        self,
        proceed: Callable[..., Awaitable[TrainingJobRef | Skipped]],
        epoch: int,
        *args: Any,
        **kwargs: Any,
    ) -> TrainingJobRef | Skipped:
        """Called for `run_epoch` of every subclass: what is collected and submitted in it is the epoch's."""
        if self.__ledger is None:
            return await proceed(epoch, *args, **kwargs)
        number = epoch if self.__books is None else self.__books.entered(epoch, self.__num_epochs)
        if self.__books is not None:
            self._curriculum_facts = {}
        with self.__ledger.working_on(number):
            outcome = await proceed(epoch, *args, **kwargs)
            if self.__books is not None:
                await self.__books.left(number, outcome)
        return outcome

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

    def around_log_progress(
        self,
        proceed: Callable[..., None],
        epoch: int,
        metrics: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Called for `log_progress` of every subclass: the metrics go into the run's files too."""
        if self.__ledger is not None:
            self.__ledger.record.add_metrics(epoch, metrics)
        proceed(epoch, metrics, *args, **kwargs)
        if self.__ledger is not None and self.__books is not None:
            self.__ledger.record.report()

    async def around_cleanup(self, proceed: Callable[..., Awaitable[None]]) -> None:
        """Called for `cleanup` of every subclass: nobody goes on collecting, the components are freed."""
        try:
            await proceed()
        finally:
            if self.__ledger is not None:
                await self.__ledger.collections.stop()
            if self.__books is not None and self.__parts is not None:
                await self.__books.close(*self.__parts)

    async def around_run_validation_evaluation(
        self, proceed: Callable[..., Awaitable[dict[str, Any]]], epoch: int, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Called for `run_validation_evaluation` of every subclass: record what was measured."""
        if self._runtime is not None and not (self.__books and self.__books.is_validated):
            self._runtime.progress.phase("validating", len(self._runtime.validation_examples))
        if self.__books is None:
            with within("validation", epoch):
                return await proceed(epoch, *args, **kwargs)
        with within("validation", self.__books.epochs_done):
            metrics = await proceed(epoch, *args, **kwargs)
        await self.__books.validated(metrics)
        return metrics


def _type_of(component: TrajectoryBuilder | TrainerAdapter) -> str:
    """The component's `_type` in quotes, or its class."""
    if isinstance(component, TrainerAdapter):
        name = component.adapter_config.type_name
    else:
        name = component.trajectory_builder_config.type_name
    return f"'{name}'" if name else type(component).__name__
