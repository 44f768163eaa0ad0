"""Parts as the toolkit's guide has its readers write them: they use the interfaces and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import etude
from etude.config.finetuning import TrainerAdapterConfig, TrainerConfig
from etude.core.job import TrainingStatusEnum
from etude.loop.trainer import EpochTrainer, EpochTrainerConfig
from tests.seed_guide import MyTrajectoryBuilder, MyTrajectoryBuilderConfig


class GuideBuilderConfig(MyTrajectoryBuilderConfig, name="guide_builder"):
    """Several evaluation runs at the same time, one for each generation."""

    num_generations: int = 4


class GuideBuilder(MyTrajectoryBuilder):
    """Remembers its collections."""

    def __init__(self, trajectory_builder_config: GuideBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.collected: list[etude.TrajectoryCollection] = []

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> etude.TrajectoryCollection:
        self.collected.append(await super().finalize(run_id, meta))
        return self.collected[-1]


class OwnPhaseBuilder(GuideBuilder):
    """Names its phase itself, the same in every epoch."""

    async def run_eval(self) -> etude.EvaluationRunOutput:
        return await self.runtime.evaluation.run(self.runtime.examples, phase="mine")


class CachingBuilder(GuideBuilder):
    """Collects in the first epoch alone, and gives the same out ever after."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        if not self.collected:
            await super().start_run(run_id, meta)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> etude.TrajectoryCollection:
        return self.collected[0] if self.collected else await super().finalize(run_id, meta)


class ReplayingBuilder(GuideBuilder):
    """Collects in every epoch, and adds what it had in the first."""

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> etude.TrajectoryCollection:
        collection = await super().finalize(run_id, meta)
        first = self.collected[0].trajectories if len(self.collected) > 1 else []
        for item in (item for group in first for trajectory in group for item in trajectory.episode):
            item.model_version = 0
        return etude.TrajectoryCollection(trajectories=[*collection.trajectories, *first], run_id=run_id)


class GuideAdapterConfig(TrainerAdapterConfig, name="guide_adapter"):
    """A backend that says nothing of its weights."""


class GuideAdapter(etude.TrainerAdapter):
    """Keeps its jobs in memory, and tells which data it was given."""

    def __init__(self, adapter_config: GuideAdapterConfig) -> None:
        super().__init__(adapter_config)
        self.jobs: dict[str, etude.TrajectoryCollection] = {}

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: etude.TrajectoryCollection) -> etude.TrainingJobRef:
        self.jobs[trajectories.run_id] = trajectories
        return etude.TrainingJobRef(run_id=trajectories.run_id, backend="guide")

    async def status(self, ref: etude.TrainingJobRef) -> etude.TrainingJobStatus:
        known = ref.run_id in self.jobs
        status = TrainingStatusEnum.COMPLETED if known else TrainingStatusEnum.NOT_FOUND
        return etude.TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status)

    async def wait_until_complete(
        self, ref: etude.TrainingJobRef, poll_interval: float = 10.0
    ) -> etude.TrainingJobStatus:
        return await self.status(ref)

    def log_progress(
        self, ref: etude.TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Nothing to log."""


class GuideTrainerConfig(TrainerConfig, name="guide_trainer"):
    """Epoch after epoch."""


class GuideTrainer(etude.Trainer):
    """The abstract methods and nothing else; it calls every collection and every job by the same name."""

    def __init__(self, trainer_config: GuideTrainerConfig) -> None:
        super().__init__(trainer_config)
        self.metrics: list[dict[str, Any]] = []

    async def run_epoch(self, epoch: int, run_id: str) -> etude.TrainingJobRef:
        await self.trajectory_builder.start_run(run_id, meta={"epoch": epoch})
        collection = await self.trajectory_builder.finalize(run_id, meta={"epoch": epoch})
        return await self.trainer_adapter.submit(self.apply_curriculum_learning(collection, epoch))

    async def run(self, num_epochs: int) -> list[etude.TrainingJobStatus]:
        statuses = []
        for epoch in range(num_epochs):
            ref = await self.run_epoch(epoch, "my-run")
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
            self.log_progress(epoch, {"my_figure": epoch + 0.5})
        return statuses

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {"epochs": self.metrics}

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        self.metrics.append(metrics)

    async def cleanup(self) -> None:
        """Nothing to free."""


class OneLoopTrainer(GuideTrainer):
    """Does everything in `run`, and asks for the status."""

    async def run(self, num_epochs: int) -> list[etude.TrainingJobStatus]:
        statuses = []
        for epoch in range(num_epochs):
            name = f"collection-{epoch}"
            await self.trajectory_builder.start_run(name)
            ref = await self.trainer_adapter.submit(await self.trajectory_builder.finalize(name))
            status = await self.trainer_adapter.status(ref)
            while not status.status.is_final:
                await asyncio.sleep(0)
                status = await self.trainer_adapter.status(ref)
            statuses.append(status)
        return statuses


class SameEpochTrainer(GuideTrainer):
    """Says that every epoch is the first."""

    async def run_epoch(self, epoch: int, run_id: str) -> etude.TrainingJobRef:
        return await super().run_epoch(0, run_id)

    async def run(self, num_epochs: int) -> list[etude.TrainingJobStatus]:
        return [
            await self.trainer_adapter.wait_until_complete(await self.run_epoch(0, "my-run"))
            for _ in range(num_epochs)
        ]


class CarelessConfig(TrainerConfig, name="careless"):
    """How its job ends; None for no job."""

    status: str | None = None


class CarelessTrainer(GuideTrainer):
    """Returns what went wrong instead of raising it."""

    async def run(self, num_epochs: int) -> list[etude.TrainingJobStatus]:
        if (status := self.trainer_config.status) is None:
            return []
        return [etude.TrainingJobStatus(run_id="job", backend="b", status=status, message="no luck")]


@etude.register_trainer(config_type=CarelessConfig)
async def careless(config: CarelessConfig, builder: etude.Builder) -> AsyncIterator[CarelessTrainer]:
    yield CarelessTrainer(config)


class GuideEpochs(EpochTrainer):
    """The shipped loop with an epoch of one's own."""

    async def run_epoch(self, epoch: int, run_id: str) -> etude.TrainingJobRef:
        await self.trajectory_builder.start_run(run_id, meta={"epoch": epoch})
        collection = await self.trajectory_builder.finalize(run_id, meta={"epoch": epoch})
        return await self.trainer_adapter.submit(collection)


TRAINERS = {
    "epochs": lambda: EpochTrainer(EpochTrainerConfig()),
    "guide epochs": lambda: GuideEpochs(EpochTrainerConfig()),
    "guide": lambda: GuideTrainer(GuideTrainerConfig()),
    "one loop": lambda: OneLoopTrainer(GuideTrainerConfig()),
    "same epoch": lambda: SameEpochTrainer(GuideTrainerConfig()),
}
"""The shipped trainer, and those that implement the interface."""
