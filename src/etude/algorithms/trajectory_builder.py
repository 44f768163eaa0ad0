"""The interface of trajectory builders: episodes in, training data out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from etude.config.finetuning import FinetuneConfig, TrajectoryBuilderConfig
from etude.core.edge import TrajectoryCollection
from etude.core.errors import EtudeError
from etude.core.evaluation import EvalOutputItem, EvaluationRunOutput
from etude.core.implementations import wrap_implementations
from etude.core.trajectory import Method

if TYPE_CHECKING:
    from etude.runtime import Runtime


class TrajectoryBuilder(ABC):
    """Runs the workflow on examples and turns the episodes into trajectories."""

    method: Method = "grpo"
    """The algorithm that the trajectories are made for; the adapter must be able to do it."""

    @property
    def methods(self) -> tuple[Method, ...]:
        """All algorithms that it makes data for, in one epoch or another."""
        return (self.method,)

    token_ids_required: bool = False
    """Set by the trainer from the adapter's capabilities before the first epoch."""

    run_config: FinetuneConfig
    """The `finetuning` block, from `initialize` on."""

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config = None  # type: ignore[assignment]  # the seed interface starts it as None
        self._runtime: Runtime | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have every implementation held to the interface."""
        super().__init_subclass__(**kwargs)
        wrap_implementations(cls, TrajectoryBuilder)

    @property
    def runtime(self) -> Runtime:
        """The open run: examples, engines, the evaluation run. Raises EtudeError before `bind_runtime`."""
        if self._runtime is None:
            raise EtudeError(
                f"{type(self).__name__} has no runtime. Call bind_runtime(runtime) before collecting, "
                "or override run_eval()."
            )
        return self._runtime

    def bind_runtime(self, runtime: Runtime) -> None:
        """Hand over what is running. Called once before `initialize`, and again around a validation."""
        self._runtime = runtime

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the `finetuning` block, and its reward function into the own config."""
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    @property
    def _block(self) -> FinetuneConfig:
        """The `finetuning` block. Raises EtudeError before `initialize`."""
        if self.run_config is None:
            raise EtudeError(
                f"{type(self).__name__} was not initialized; call initialize(run_config) first, and in an "
                "`initialize` of its own `await super().initialize(run_config)`"
            )
        return self.run_config

    async def run_eval(self) -> EvaluationRunOutput:
        """Run the workflow once on each of the runtime's examples, and score the episodes.

        Each call plays new episodes, also calls at the same time. Episodes that failed, or that the reward
        function could not score, are in the output's `left_out` and nowhere else.
        """
        runtime, reward = self.runtime, self._block.reward_function
        output = await runtime.evaluation.run(
            runtime.examples, on_episode=runtime.progress.episode_finished, on_score=self._score_made
        )
        return output if reward is None else output.scored_by(reward.name)

    def _score_made(self, evaluator: str, item: EvalOutputItem) -> None:
        reward = self._block.reward_function
        if reward is not None and evaluator == reward.name:
            self.runtime.progress.scored(item)

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start collecting for one epoch, under a name of its own.

        `meta` has the `epoch` (from 0), `begins_from` (the number of the version that training began with)
        and whatever else the trainer knows. Raises ValueError for a `run_id` that is being collected.
        """

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for the episodes of `start_run` and return their trajectories.

        Raises ValueError for a `run_id` that was not started, ErrorBudgetExceeded when too many
        episodes or scores failed.
        """

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float:
        """The reward of one scored episode; override it to shape rewards.

        Raises ValueError for an item without a score: a failed evaluator is never a zero reward.
        """
        if not output_item.is_scored or output_item.score is None:
            reason = output_item.error or f"the score is {output_item.score!r}"
            raise ValueError(f"example {output_item.id!r} has no reward: {reason}")
        return float(output_item.score)

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record facts about a collection, in `output_dir` when one is given."""

    def facts(self, run_id: str) -> dict[str, Any]:
        """Counts of a finished collection, as JSON; empty when the builder keeps none.

        The run counts the episodes, failures, calls and tokens of what it hands out itself. A builder adds
        what only it knows: `rewards` (as it shapes them), `untargeted`, `left_out` (counts by reason). Of
        episodes that do not come from the run it may tell those counts too, by the same names.
        """
        return {}

    async def cleanup(self) -> None:  # noqa: B027  # a hook: builders that hold nothing need not override it
        """Stop what is still being collected and free what is held."""
