"""The toolkit's guide to extending the harness, as a user's module: its code, with one import root.

What the guide leaves open ("implement the interface's methods") is filled in as it describes it.
`seed_guide.yml` is the guide's complete config.
"""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, Field

from etude import (
    Builder,
    EpisodeItem,
    EvalInputItem,
    EvalOutputItem,
    EvaluationRunOutput,
    Evaluator,
    EvaluatorConfig,
    FinetuneConfig,
    Trainer,
    TrainerAdapter,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    WorkflowConfig,
    register_evaluator,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_workflow,
    workflow,
)

logger = logging.getLogger(__name__)


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
    """One evaluation run for each generation, all at the same time."""

    def __init__(self, trajectory_builder_config: MyTrajectoryBuilderConfig):
        super().__init__(trajectory_builder_config)
        self.config = trajectory_builder_config
        self.evaluation_runs: dict[str, list[asyncio.Task[EvaluationRunOutput]]] = {}

    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        if run_id in self.evaluation_runs:
            raise ValueError(f"Run {run_id} is already in progress.")
        logger.info("Starting run %s with %d generations", run_id, self.config.num_generations)
        self.evaluation_runs[run_id] = [
            asyncio.create_task(self.run_eval(), name=f"{run_id}-{generation}")
            for generation in range(self.config.num_generations)
        ]

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        if run_id not in self.evaluation_runs:
            raise ValueError(f"No evaluation runs found for run_id: {run_id}")
        groups: dict[str, list[Trajectory]] = {}
        for output in await asyncio.gather(*self.evaluation_runs.pop(run_id)):
            rewards = await self.read_rewards(output, meta)
            for item in output.eval_input.eval_input_items:
                episode = self.parse(item)
                if item.id in rewards and len(episode) >= self.config.min_episode_length:
                    metadata = {"example_id": item.id}
                    trajectory = Trajectory(episode=episode, reward=rewards[item.id], metadata=metadata)
                    logger.debug("Trajectory details: %s", trajectory.metadata)
                    groups.setdefault(item.id, []).append(trajectory)
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    async def read_rewards(self, output: EvaluationRunOutput, meta: dict | None) -> dict[str, float]:
        """By the example's id."""
        reward, rewards = self.trajectory_builder_config.reward, {}
        for name, result in output.evaluation_results:
            if reward is not None and name == reward.name:
                for item in result.eval_output_items:
                    rewards[item.id] = await self.compute_reward(item, meta)
        return rewards

    def parse(self, item: EvalInputItem) -> list[EpisodeItem]:
        """The agent's first prompt, and each answer with its logprobs."""
        items = [
            EpisodeItem(role=message["role"], content=message["content"])
            for message in item.episode.calls[0].request.messages
        ]
        for call in item.episode.calls:
            answer = call.completion.message
            if self.config.include_tool_calls or not answer.get("tool_calls"):
                content, logprobs = answer["content"] or "", call.completion.logprobs
                items.append(EpisodeItem(role="assistant", content=content, logprobs=logprobs))
        return items

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("Run %s: %s", run_id, metrics)

    async def cleanup(self) -> None:
        for tasks in self.evaluation_runs.values():
            for task in tasks:
                if not task.done():
                    task.cancel()
        self.evaluation_runs.clear()


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
    """Posts rows to a training server and asks for its jobs."""

    transport: httpx.AsyncBaseTransport | None = None
    """Where a test has its training server."""

    def __init__(self, adapter_config: MyTrainerAdapterConfig):
        super().__init__(adapter_config)
        self.backend = adapter_config.backend
        self.client: httpx.AsyncClient = None
        self.pending_tasks: dict[str, asyncio.Task] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self.client = httpx.AsyncClient(
            base_url=self.backend.endpoint,
            headers={"Authorization": f"Bearer {self.backend.api_key}"},
            timeout=self.backend.timeout,
            transport=self.transport,
        )

    async def is_healthy(self) -> bool:
        return (await self.client.get("/health")).is_success

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        if self.adapter_config.validate_trajectories and not len(trajectories):
            raise ValueError("No trajectories to train on.")
        rows = [
            {
                "messages": [{"role": item.role, "content": item.content} for item in trajectory.episode],
                "logprobs": trajectory.episode[-1].logprobs,
                "reward": trajectory.reward,
                "group": trajectory.metadata["example_id"],
            }
            for group in trajectories.trajectories
            for trajectory in group
        ]
        response = await self.client.post(f"/jobs/{trajectories.run_id}", json={"rows": rows})
        response.raise_for_status()
        return TrainingJobRef(run_id=trajectories.run_id, backend="my_backend")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        response = await self.client.get(f"/jobs/{ref.run_id}")
        if response.status_code == 404:
            return self.answer(ref, TrainingStatusEnum.NOT_FOUND)
        return self.answer(ref, TrainingStatusEnum(response.json()["status"]))

    def answer(self, ref: TrainingJobRef, status: TrainingStatusEnum) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status)

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        status = await self.status(ref)
        while status.status in (TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING):
            await asyncio.sleep(poll_interval)
            status = await self.status(ref)
        return status

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        logger.info("Job %s: %s", ref.run_id, metrics)

    async def cleanup(self) -> None:
        # Cancel pending tasks
        for task in self.pending_tasks.values():
            if not task.done():
                task.cancel()
        # Close connections
        await self.client.aclose()
        # Clear state
        self.pending_tasks.clear()


@register_trainer_adapter(config_type=MyTrainerAdapterConfig)
async def my_trainer_adapter(config: MyTrainerAdapterConfig, builder: Builder):
    """Register the custom trainer adapter."""
    yield MyTrainerAdapter(adapter_config=config)


class MyTrainerConfig(TrainerConfig, name="my_trainer"):
    """Configuration for my trainer."""


class MyTrainer(Trainer):
    """Epoch after epoch, on the easiest groups first."""

    def __init__(self, trainer_config: MyTrainerConfig, **kwargs) -> None:
        super().__init__(trainer_config, **kwargs)
        self.jobs: dict[int, TrainingJobRef] = {}
        self.metrics: dict[str, Any] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self._curriculum_state = {
            "current_percentile": self.curriculum_config.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": set(),
        }

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        try:
            name = f"{run_id}_epoch_{epoch}"
            await self.trajectory_builder.start_run(name, meta={"epoch": epoch})
            collection = await self.trajectory_builder.finalize(name, meta={"epoch": epoch})
            logger.info("Starting epoch %d with %d examples", epoch, len(collection.trajectories))
            self.jobs[epoch] = await self.trainer_adapter.submit(
                self.apply_curriculum_learning(collection, epoch)
            )
            return self.jobs[epoch]
        except Exception:
            logger.exception("Error in epoch %d", epoch)
            raise

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        statuses = []
        for epoch in range(num_epochs):
            ref = await self.run_epoch(epoch, "guide")
            status = await self.trainer_adapter.wait_until_complete(ref, poll_interval=0.001)
            statuses.append(status)
            if status.status == TrainingStatusEnum.FAILED:
                logger.error("Training failed: %s", status.message)
                break
            self.log_progress(epoch, {"percentile": self._curriculum_state["current_percentile"]})
        return statuses

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        if not self.curriculum_config.enabled:
            return trajectory_collection
        state, groups = self._curriculum_state, trajectory_collection.trajectories
        if epoch - state["last_expansion_epoch"] > self.curriculum_config.expansion_interval:
            state["current_percentile"] += self.curriculum_config.increment_percentile
            state["last_expansion_epoch"] = epoch
        easiest_first = sorted(groups, key=lambda group: -sum(one.reward for one in group) / len(group))
        chosen = easiest_first[: max(1, int(len(groups) * state["current_percentile"]))]
        state["total_groups"] = len(groups)
        state["included_groups"].update(group[0].metadata["example_id"] for group in chosen)
        return TrajectoryCollection(trajectories=chosen, run_id=trajectory_collection.run_id)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return self.metrics

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        self.metrics[str(epoch)] = metrics
        folder = Path(output_dir or self.run_config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "my_progress.jsonl").open("a") as file:
            file.write(json.dumps({"epoch": epoch, **metrics}) + "\n")

    async def cleanup(self) -> None:
        await self.trajectory_builder.cleanup()
        await self.trainer_adapter.cleanup()


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

    @workflow
    async def ask(example, episode):
        messages = [
            {"role": "system", "content": "Answer with yes or no."},
            {"role": "user", "content": example.inputs["question"]},
        ]
        return (await episode.chat(messages, model=config.llm)).text

    yield ask


class MyEvaluatorConfig(EvaluatorConfig, name="my_custom_evaluator"):
    """The evaluator of the guide's example."""


class MyEvaluator(Evaluator):
    """Whether the answer is the expected one."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        right = item.output_obj == item.expected_output_obj
        return EvalOutputItem(id=item.id, score=float(right), reasoning="as expected" if right else "wrong")


@register_evaluator(config_type=MyEvaluatorConfig)
async def my_evaluator(config: MyEvaluatorConfig, builder: Builder):
    """Register the evaluator."""
    yield MyEvaluator()
