"""The interface of trajectory builders: episodes in, training data out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from etude.config.finetuning import FinetuneConfig, TrajectoryBuilderConfig
from etude.core.conversion import TrajectoryCollection
from etude.core.errors import EtudeError
from etude.core.evaluation import EvalOutputItem, EvaluationRunOutput
from etude.core.return_checks import wrap_implementations
from etude.core.trajectory import Method

if TYPE_CHECKING:
    from etude.runtime import Runtime


class TrajectoryBuilder(ABC):
    """Runs the workflow on examples and turns the episodes into trajectories."""

    method: Method = "grpo"
    """The algorithm that the trajectories are for. The adapter must support it."""

    token_ids_required: bool = False
    """Set by the trainer from the adapter's capabilities before the first epoch."""

    run_config: FinetuneConfig
    """The `finetuning` block, set by `initialize`."""

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config = None  # type: ignore[assignment]  # the seed interface starts it as None
        self._runtime: Runtime | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap every implementation, so that it is checked against the interface."""
        super().__init_subclass__(**kwargs)
        wrap_implementations(cls, TrajectoryBuilder)

    @property
    def runtime(self) -> Runtime:
        """The open run: examples, engines, evaluation. Raises EtudeError before `bind_runtime`."""
        if self._runtime is None:
            raise EtudeError(
                f"{type(self).__name__} has no runtime. Call bind_runtime(runtime) before collecting, "
                "or override run_eval()."
            )
        return self._runtime

    def bind_runtime(self, runtime: Runtime) -> None:
        """Take the running parts. Called once before `initialize`, and again around a validation."""
        self._runtime = runtime

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Keep the `finetuning` block, and its reward function in the builder's config."""
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

        Each call plays new episodes, even when calls overlap. Failed episodes, and episodes that the reward
        function could not score, appear only in the output's `left_out`.
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
        """Start collecting for one epoch, under a new `run_id`.

        `meta` has the `epoch` (from 0), `begins_from` (the number of the version that training began with)
        and other facts of the trainer. Raises ValueError if `run_id` is already being collected.
        """

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for the episodes of `start_run` and return their trajectories.

        Raises ValueError for a `run_id` that was not started, ErrorBudgetExceeded if too many episodes or
        scores failed.
        """

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float:
        """Return the reward of one scored episode. Override this to shape rewards.

        Raises ValueError for an item without a score: a failed evaluator is never a zero reward.
        """
        if not output_item.is_scored or output_item.score is None:
            reason = output_item.error or f"the score is {output_item.score!r}"
            raise ValueError(f"example {output_item.id!r} has no reward: {reason}")
        return float(output_item.score)

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record facts about a collection, in `output_dir` if one is given."""

    def facts(self, run_id: str) -> dict[str, Any]:
        """Return the counts of a finished collection, as JSON; empty if the builder keeps none.

        The run itself counts the episodes, failures, calls and tokens that it hands out. A builder adds what
        only it knows: `rewards` (after shaping), `untargeted`, `left_out` (counts by reason). It may also
        report the run's counts, under the same names, for episodes from elsewhere.
        """
        return {}

    async def cleanup(self) -> None:  # noqa: B027  # a hook: builders that hold nothing need not override it
        """Stop collections in progress and free all resources."""
