"""Trajectory builders: their interface, and the one that collects for an algorithm.

It runs the workflow, scores, groups by example, has an algorithm make samples, and counts the rest.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import AliasChoices, Field, FiniteFloat, model_validator

from etude.algorithms.plays import by_agent
from etude.algorithms.samples import (
    IDLE,
    CutOff,
    Group,
    ScoredEpisode,
    Tally,
    UnitGroup,
    count_cut_off,
    find_branches,
    require_tokens,
    targeted_calls,
    without_cut_off,
    without_retries,
)
from etude.config.finetuning import FinetuneConfig, TrajectoryBuilderConfig
from etude.config.import_path import user_code
from etude.core.call import Call
from etude.core.episode import EpisodeRecord, Example, LoggedExample, count_episodes
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import LARGEST_SCORE, EvalOutputItem, EvaluationRunOutput
from etude.core.interfaces import wrap_implementations
from etude.core.keys import content_hash, generator
from etude.core.sample import Kind, SampleOrPair, TrajectoryCollection
from etude.core.threads import end_tasks
from etude.core.trajectory import Method
from etude.rollout.evaluation import merge_outputs
from etude.rollout.phases import current_number, examples_for_epoch
from etude.store.files import append_json_line

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.runtime import Runtime


Need = Literal["logprobs", "start", "reference"]
"""`logprobs`: the sampler's. `start`: the learner's own at the start of a job of several steps. `reference`:
logprobs of the model that training began with."""


class Collecting(TrajectoryBuilderConfig):
    """The collecting half of an `Algorithm`: which episodes it collects and which samples it makes."""

    kind: ClassVar[Kind] = "samples"
    """The data that it learns from, which decides the backends that can train it."""

    num_generations: int = Field(8, ge=1, le=1000, validation_alias=AliasChoices("num_generations", "group"))
    """Set the number of episodes for each example of an epoch."""
    examples_per_epoch: int | None = Field(default=None, ge=1)
    """Set the number of examples per epoch, from a shuffle that cycles through the dataset; default: all."""
    replace_flat_groups: int = Field(default=0, ge=0)
    """Set how many other examples an epoch may play to replace flat ones (dynamic sampling, DAPO). An example
    is flat if no episode has an advantage over the others."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount later rewards by this factor, for agents that give step rewards."""
    credit: Literal["episode", "agent"] = "episode"
    """`episode`: all agents have the episode's reward. `agent`: each agent of the model is compared with
    itself in other episodes, by its payoff in a protocol or its measured score "reward"."""
    cut_off: CutOff = "train"
    """Choose how to treat answers that the token limit cut off. `train`: like all others. `mask`: they are
    left out of the loss, but count in comparisons."""
    cut_off_penalty: FiniteFloat = Field(default=0.0, ge=0, le=LARGEST_SCORE)
    """Subtract this from an episode's reward for each answer that the token limit cut off."""

    @model_validator(mode="before")
    @classmethod
    def _is_given_once(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and {"num_generations", "group"} <= given.keys():
            raise ValueError("num_generations and group are two names of one option; give one of them")
        return given

    @abstractmethod
    def objective(self) -> Collecting:
        """Return the algorithm whose loss learns from the data."""

    def needs(self) -> set[Need]:
        """Return the data that the samples must have, or that a learner must compute."""
        return set() if self.kind == "imitation" else {"logprobs"}

    def check(self) -> None:
        """Raise RequestError for options that do nothing, or with which nothing could ever be learned."""

    async def check_protocol(self, builder: Builder) -> None:
        """Raise RequestError if nothing could ever be learned from the protocol that the workflow plays."""

    async def check_run(self, runtime: Runtime) -> None:
        """Raise RequestError if the run's examples or models do not fit. Here: for logged chats, if the
        algorithm needs tokens that the model itself sampled."""
        logged = next((example for example in runtime.examples if isinstance(example, LoggedExample)), None)
        if logged is None or not (self.kind == "samples" or "logprobs" in self.needs()):
            return
        remedy = "set `reference: base`"
        if self.kind == "samples":
            remedy = "take `expert_iteration`, `supervised`, or `dpo` with `reference: base`"
        raise RequestError(
            f"{self.type_name} learns from the probabilities that answers were sampled with, and the chats "
            f"of {logged.origin} were logged without token ids and logprobs; {remedy}"
        )

    @property
    def widths(self) -> Any:
        """How many answers plays have for each turn; None leaves this to the workflow."""
        return None

    def groups(self, episodes: Sequence[Group], tally: Tally) -> list[UnitGroup]:
        """Return the samples of a whole collection. `episodes` has the scored episodes by example."""
        parts = [part for group in episodes for part in self.parts(group, tally)]
        return [UnitGroup(self.samples(part, tally), [scored.reward for scored in part]) for part in parts]

    async def complete_groups(self, groups: list[UnitGroup], runtime: Runtime | None) -> list[UnitGroup]:
        """Add what others must provide to the samples, such as the logprobs of a teacher engine."""
        return groups

    @abstractmethod
    def find_comparable(self, groups: Sequence[UnitGroup]) -> list[bool]:
        """Return for each group of a collection whether it has something to compare."""

    @abstractmethod
    def is_idle(self, groups: Sequence[UnitGroup], *, at_base: bool) -> bool:
        """Return whether a job on the groups would change nothing."""

    def parts(self, group: Group, tally: Tally) -> list[Group]:
        """Return the group itself, or a group for each agent if `credit` is not `episode`."""
        return [group] if self.credit == "episode" else [*by_agent(group, tally)]

    def samples(self, group: Group, tally: Tally) -> Sequence[SampleOrPair]:
        """Return the samples or pairs of a group of episodes. Here: every branch of every episode.

        Add the counts of everything left out to `tally.left_out`.
        """
        return [sample for scored in group for sample in scored.samples(self.discount)]


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
        runtime, reward = self.runtime, self._block.reward_name
        output = await runtime.evaluation.run(
            runtime.examples, on_episode=runtime.progress.episode_finished, on_score=self._score_made
        )
        return output if reward is None else output.scored_by(reward)

    def _score_made(self, evaluator: str, item: EvalOutputItem) -> None:
        if evaluator == self._block.reward_name:
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


class CollectingBuilder(TrajectoryBuilder):
    """Collects several episodes for each example and has an algorithm make samples from them."""

    def __init__(self, trajectory_builder_config: Collecting) -> None:
        super().__init__(trajectory_builder_config)
        self.algorithm = trajectory_builder_config
        self.method: Method = self.algorithm.objective().type_name
        self.evaluation_runs: dict[str, asyncio.Task[EvaluationRunOutput]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._replacements: dict[int, int] = {}
        """The number of examples that each epoch played to replace flat ones."""

    @property
    def collection_label(self) -> str:
        """A part of the episodes' names, equal for all targets that collect alike."""
        widths = self.algorithm.widths
        if widths is None:
            return ""
        return f"k{widths if isinstance(widths, int) else content_hash(widths)[:8]}"

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the `finetuning` block. Raises RequestError without a reward, or if nothing can be learned."""
        await super().initialize(run_config)
        run_config.require_reward()
        with user_code(EtudeError, f"{self.algorithm.type_name} cannot be checked"):
            self.algorithm.check()
        if self._runtime is not None:
            await self.algorithm.check_run(self._runtime)

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start the episodes of the epoch `meta["epoch"]`."""
        if run_id in self.evaluation_runs:
            raise ValueError(f"Run {run_id} is already in progress.")
        if self.run_config is None:
            # Used without a trainer that initializes it: take the block's defaults.
            self.run_config = FinetuneConfig()
        epoch = self.collected_epoch(meta)
        self.evaluation_runs[run_id] = asyncio.create_task(self.collect(epoch), name=f"collect {run_id}")

    @staticmethod
    def collected_epoch(meta: dict[str, Any] | None) -> int:
        """Return the collection's epoch, from 0: the trainer's, or without a trainer `meta`'s."""
        epoch = current_number("train")
        return epoch if epoch is not None else int((meta or {}).get("epoch") or 0)

    async def collect(self, epoch: int) -> EvaluationRunOutput:
        """Run `num_generations` episodes on each of the epoch's examples and score them."""
        if self._runtime is None:
            return await self.run_eval()
        examples = examples_for_epoch(
            self.runtime.examples, self.algorithm.examples_per_epoch, epoch, self.run_config.seed
        )
        output = await self._run(examples)
        left, latest = self.algorithm.replace_flat_groups, output
        if not left:
            return output
        known = {example.id for example in examples}
        others = [example for example in self.runtime.examples if example.id not in known]
        generator(self.run_config.seed, "replacements", epoch).shuffle(others)
        while True:
            groups = await self._scored_groups(latest, Tally(), {"epoch": epoch})
            made = (self.algorithm.groups([group], Tally()) for group in groups)
            compared = sum(any(self.algorithm.find_comparable(each)) for each in made)
            count = min(len({item.id for item in self._rewards_in(latest)}) - compared, left)
            # A stored run is read back without its examples. Each call then gives the stored result.
            if not count or (not others and self.runtime.examples):
                break
            latest, others = await self._run(others[:count]), others[count:]
            left -= count
            played = {item.id for item in latest.eval_input.eval_input_items}
            self._replacements[epoch] = self._replacements.get(epoch, 0) + len(played)
            output = merge_outputs([output, latest])
        return output

    async def _run(self, examples: Sequence[Example]) -> EvaluationRunOutput:
        self.runtime.progress.phase("collecting", count_episodes(examples, self.algorithm.num_generations))
        return await self.runtime.evaluation.run(
            examples,
            phase=self.collection_label,
            generations=self.algorithm.num_generations,
            on_episode=self._episode_finished,
            on_score=self._score_made,
            widths=self.algorithm.widths,
        )

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for the episodes and build the groups, in the order of the examples."""
        if run_id not in self.evaluation_runs:
            raise ValueError(f"No evaluation runs found for run_id: {run_id}")
        try:
            output = await self.evaluation_runs[run_id]
        finally:
            self.evaluation_runs.pop(run_id, None)
        epoch = self.collected_epoch(meta)
        tally = Tally()
        about = {"run_id": run_id, **(meta or {})}
        episodes = await self._scored_groups(output, tally, about)
        tally.replacements = self._replacements.pop(epoch, 0)
        with user_code(EtudeError, f"{self.algorithm.type_name} cannot make samples of the episodes"):
            groups = self.algorithm.groups(episodes, tally)
            differ = self.algorithm.find_comparable(groups)
        several = [own for group, own in zip(groups, differ, strict=True) if len(group.rewards or ()) > 1]
        tally.reward_groups = {"compared": len(several), "flat": several.count(False)}
        groups = await self.algorithm.complete_groups(groups, self._runtime)
        start = int(about.get("begins_from", 0))
        answers = (call.completion for group in episodes for scored in group for call in scored.calls)
        versions = {answer.model_version or 0 for answer in answers if answer is not None}
        at_base = self.run_config.fine_tune_from_scratch or versions <= {start}
        if not any(differ) and self.algorithm.is_idle(groups, at_base=at_base):
            tally.leave_out(IDLE, sum(bool(group.units) for group in groups))
            groups = []
        if self.algorithm.cut_off == "mask":
            groups = [without_cut_off(group, self.algorithm.kind, tally) for group in groups]
        self._facts = {run_id: tally.facts()}
        made = [[replace(unit, group_rewards=group.rewards) for unit in group.units] for group in groups]
        return TrajectoryCollection(trajectories=[*filter(None, made)], run_id=run_id, method=self.method)

    def facts(self, run_id: str) -> dict[str, Any]:
        """Return the counts of the last finished collection."""
        return dict(self._facts.get(run_id, {}))

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Append a line to `trajectory_builder.jsonl` in `output_dir`, if one is given."""
        if output_dir is not None:
            append_json_line(Path(output_dir) / "trajectory_builder.jsonl", {"run_id": run_id, **metrics})

    async def cleanup(self) -> None:
        """Cancel collections that nobody finalised, and wait until they have stopped."""
        tasks = list(self.evaluation_runs.values())
        self.evaluation_runs.clear()
        await end_tasks(*tasks)

    async def _scored_groups(
        self, output: EvaluationRunOutput, tally: Tally, meta: dict[str, Any]
    ) -> list[Group]:
        scores = {(item.id, item.generation): item for item in self._rewards_in(output)}
        groups: dict[str, list[ScoredEpisode]] = defaultdict(list)
        for item in output.eval_input.eval_input_items:
            tally.episodes += 1
            score, reward = scores.get((item.id, item.generation)), math.nan
            if score is not None and score.is_scored:
                reward = await self.compute_reward(score, meta)
            if item.episode is None or score is None or not math.isfinite(reward):
                tally.unscored += 1
            elif scored := self.score_episode(item.episode, reward, score.reasoning, tally):
                groups[item.id].append(scored)
        return list(groups.values())

    def score_episode(
        self, episode: EpisodeRecord, reward: float, reasoning: Any, tally: Tally
    ) -> ScoredEpisode | None:
        """Return an episode with its reward and calls, or None if no call of it is targeted."""
        used = without_retries(episode)
        calls = self._select_calls(used)
        faults = [fault for _, fault in find_branches(calls)]
        tally.rewards.append(reward)
        tally.retried += len(episode.calls) - len(used.calls)
        tally.branches += len(faults)
        tally.drift.update(filter(None, faults))
        if not calls:
            tally.untargeted += 1
            return None
        penalty = self.algorithm.cut_off_penalty
        return ScoredEpisode(
            episode, reward - penalty * count_cut_off(calls), calls, reasoning, penalty=penalty
        )

    def _select_calls(self, episode: EpisodeRecord) -> list[Call]:
        return targeted_calls(episode, self.run_config.target_functions, self.target_model)

    def _episode_finished(self, episode: EpisodeRecord) -> None:
        self.runtime.progress.episode_finished(episode)
        if self.token_ids_required:
            # Check the first episodes as they finish, so that a wrong engine does not cost an epoch.
            require_tokens(
                episode, self._select_calls(episode), logprobs="logprobs" in self.algorithm.needs()
            )

    def _rewards_in(self, output: EvaluationRunOutput) -> list[EvalOutputItem]:
        if self.run_config.reward_name is None and len(output.evaluation_results) == 1:
            return output.evaluation_results[0][1].eval_output_items
        try:
            return output.evaluator_items(self.run_config.require_reward())
        except KeyError as error:
            names = ", ".join(name for name, _ in output.evaluation_results) or "none"
            raise RequestError(
                f"the reward function {error} is not among the evaluators that ran ({names}); "
                "name one of them under 'finetuning.reward_function.name'"
            ) from None

    @property
    def target_model(self) -> str | None:
        """The entry of `llms` whose calls are trained on."""
        named = self._block.target_model
        return named or (None if self._runtime is None else self._runtime.target_model)
