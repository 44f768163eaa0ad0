"""A trainer that does everything in one loop and asks for the status, and a backend that takes its time.

For a folder that has the programs of the pages on own parts.
"""

import asyncio

from coin_backend import CoinBackend, CoinBackendConfig

import etude


class PollingConfig(etude.TrainerConfig, name="polling"):
    """As many epochs as there are."""


class Polling(etude.Trainer):
    """Has no epochs but the jobs that it submits."""

    async def run_epoch(self, epoch: int, run_id: str) -> etude.TrainingJobRef:
        raise NotImplementedError

    async def run(self, num_epochs: int) -> list[etude.TrainingJobStatus]:
        statuses = []
        for epoch in range(num_epochs):
            await self.trajectory_builder.start_run("mine")
            ref = await self.trainer_adapter.submit(await self.trajectory_builder.finalize("mine"))
            status = await self.trainer_adapter.status(ref)
            while not status.status.is_final:
                await asyncio.sleep(0)
                status = await self.trainer_adapter.status(ref)
            statuses.append(status)
            self.log_progress(epoch, {"jobs": len(statuses)})
        return statuses

    async def get_metrics(self, run_id: str) -> dict:
        return {}

    def log_progress(self, epoch: int, metrics: dict, output_dir: str | None = None) -> None:
        """The run's files have it."""

    async def cleanup(self) -> None:
        await self.trajectory_builder.cleanup()


@etude.register_trainer(config_type=PollingConfig)
async def polling(config: PollingConfig, builder: etude.Builder):
    yield Polling(config)


class SlowBackendConfig(CoinBackendConfig, name="slow_coin_backend"):
    """Jobs run for three looks."""

    forgets: bool = False


class SlowBackend(CoinBackend):
    """Says that a job runs, when it is asked the first times; `forgets` jobs of an earlier process."""

    def __init__(self, adapter_config, coin, folder) -> None:
        super().__init__(adapter_config, coin, folder)
        self.looks: dict[str, int] = {}

    async def submit(self, trajectories: etude.TrajectoryCollection) -> etude.TrainingJobRef:
        name = trajectories.run_id
        if self.adapter_config.forgets and name not in self.looks:
            (self.folder / f"{name}.json").unlink(missing_ok=True)
            self.looks[name] = 0
        return await super().submit(trajectories)

    async def status(self, ref: etude.TrainingJobRef) -> etude.TrainingJobStatus:
        status = await super().status(ref)
        changed = {"status": etude.TrainingStatusEnum.RUNNING, "metadata": None}
        if self.adapter_config.forgets and ref.run_id not in self.looks:
            changed["status"] = etude.TrainingStatusEnum.NOT_FOUND
            return status.model_copy(update=changed)
        self.looks[ref.run_id] = self.looks.get(ref.run_id, 0) + 1
        return status.model_copy(update=changed) if self.looks[ref.run_id] <= 3 else status


@etude.register_trainer_adapter(config_type=SlowBackendConfig)
async def slow_backend(config: SlowBackendConfig, builder: etude.Builder):
    model = await builder.get_llm(builder.config.finetuning.target_model)
    yield SlowBackend(config, model, builder.run.checkpoints)
