"""The guide to extending the harness: a trajectory builder, a trainer adapter and a trainer of one's own.

The code is the guide's, with `etude` as its one import root; the methods that it leaves to the reader
do as little as they can.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from etude import (
    Builder,
    EvaluatorConfig,
    Trainer,
    TrainerAdapter,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    WorkflowConfig,
    register_evaluator,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_workflow,
)


class MyTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="my_traj_builder"):
    """Configuration for my custom trajectory builder."""

    num_generations: int = Field(default=2, ge=1, description="Number of trajectory generations per example")
    include_tool_calls: bool = Field(
        default=True, description="Whether to include tool call messages in trajectories"
    )
    min_episode_length: int = Field(
        default=2, description="Minimum number of messages required for a valid trajectory"
    )


class MyTrajectoryBuilder(TrajectoryBuilder):
    """Collects nothing."""

    def __init__(self, trajectory_builder_config: MyTrajectoryBuilderConfig):
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, Any] = {}

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self.evaluation_runs[run_id] = meta

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        return TrajectoryCollection(trajectories=[], run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        return None


@register_trajectory_builder(config_type=MyTrajectoryBuilderConfig)
async def my_trajectory_builder(config: MyTrajectoryBuilderConfig, builder: Builder):
    """Register the custom trajectory builder."""
    yield MyTrajectoryBuilder(trajectory_builder_config=config)


class MyBackendConfig(BaseModel):
    """Configuration for the training backend."""

    endpoint: str = Field(description="Training API endpoint URL")
    api_key: str = Field(description="API key for authentication")
    timeout: int = Field(default=3600, description="Request timeout in seconds")
    # Training hyperparameters
    learning_rate: float = Field(default=1e-5, description="Learning rate")
    batch_size: int = Field(default=4, description="Training batch size")
    gradient_accumulation_steps: int = Field(default=4, description="Gradient accumulation")


class MyTrainerAdapterConfig(TrainerAdapterConfig, name="my_trainer_adapter"):
    """Configuration for my trainer adapter."""

    backend: MyBackendConfig = Field(description="Backend configuration")
    validate_trajectories: bool = Field(
        default=True, description="Whether to validate trajectories before submission"
    )


class MyTrainerAdapter(TrainerAdapter):
    """Trains nothing."""

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        return TrainingJobRef(run_id=trajectories.run_id, backend="mine")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=ref.run_id, backend="mine", status=TrainingStatusEnum.COMPLETED)

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        return None


@register_trainer_adapter(config_type=MyTrainerAdapterConfig)
async def my_trainer_adapter(config: MyTrainerAdapterConfig, builder: Builder):
    """Register the custom trainer adapter."""
    yield MyTrainerAdapter(adapter_config=config)


class MyTrainerConfig(TrainerConfig, name="my_trainer"):
    """Configuration for my trainer."""


class MyTrainer(Trainer):
    """Runs each epoch once."""

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        await self.trajectory_builder.start_run(run_id, {"epoch": epoch})
        return await self.trainer_adapter.submit(await self.trajectory_builder.finalize(run_id))

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        jobs = [await self.run_epoch(epoch, f"epoch-{epoch}") for epoch in range(num_epochs)]
        return [await self.trainer_adapter.wait_until_complete(job) for job in jobs]

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {}

    async def cleanup(self) -> None:
        return None

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        return None


@register_trainer(config_type=MyTrainerConfig)
async def my_trainer(config: MyTrainerConfig, builder: Builder):
    """Register the custom trainer."""
    yield MyTrainer(trainer_config=config)


class MyAgentConfig(WorkflowConfig, name="my_agent_workflow"):
    """The agent of the guide's example."""

    llm: str


@register_workflow(config_type=MyAgentConfig)
async def my_agent(config: MyAgentConfig, builder: Builder):
    """Register the agent."""
    yield config.llm


class MyEvaluatorConfig(EvaluatorConfig, name="my_custom_evaluator"):
    """The evaluator of the guide's example."""


@register_evaluator(config_type=MyEvaluatorConfig)
async def my_evaluator(config: MyEvaluatorConfig, builder: Builder):
    """Register the evaluator."""
    yield config
