"""DPO data: pairs of episodes of one example, or of answers to one prompt, the better one chosen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from pydantic import Field

from etude.algorithms.branches import Branch
from etude.algorithms.candidates import pair_of, pair_rewards, turns_of
from etude.algorithms.collecting import CollectingBuilder, CollectingConfig
from etude.algorithms.plays import by_agent, is_play
from etude.algorithms.preferences import preference, same_prompt
from etude.algorithms.protocol_checks import require_branching
from etude.algorithms.scored import Group, ScoredEpisode, Tally
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trajectory_builder
from etude.core.errors import RequestError
from etude.core.trajectory import DPOItem, Method, Trajectory

if TYPE_CHECKING:
    from etude.config.builder import Builder

TIE = "pair with equal rewards"
TOO_CLOSE = "pair whose rewards differ by less than min_reward_diff"
SAME_RESPONSE = "pair of equal responses"
OTHER_PROMPT = "pair of episodes that began with different prompts"
OVER_LIMIT = "pair beyond max_pairs_per_group"

_TOLERANCE = 1e-9
"""0.3 - 0.1 counts as a difference of 0.2."""

T = TypeVar("T")


class DpoBuilderConfig(CollectingConfig, name="dpo"):
    """Pairs of episodes, or of answers to one prompt, for DPO."""

    compare: Literal["episodes", "turns"] = Field(
        default="episodes",
        description="Episodes of an example by their rewards; or the answers to one prompt within an "
        "episode: in a protocol by what they were worth, elsewhere by the step reward after each.",
    )
    pairs: Literal["all", "best_vs_worst"] = Field(
        default="all", description="Pair every two episodes of an example, or only its best and its worst."
    )
    min_reward_diff: float = Field(
        default=0.01, gt=0, description="Pairs whose rewards differ by less are left out; ties always are."
    )
    max_pairs_per_group: int | None = Field(
        default=None,
        ge=1,
        description="Keep at most this many pairs of an example (of a prompt, when turns are compared): the "
        "clearest.",
    )


def dpo_trajectories(group: Group, config: DpoBuilderConfig, tally: Tally) -> list[Trajectory]:
    """The pairs of a group, by falling reward difference, one trajectory each."""
    trajectories = [
        _trajectory(better, worse, branch, item)
        for better, worse in _ranked(group, lambda scored: scored.reward, config, tally)
        for branch, item in _preferences(better, worse, tally)
    ]
    return _limited(trajectories, config, tally)


def turn_preferences(group: Group, config: DpoBuilderConfig, tally: Tally) -> list[Trajectory]:
    """The pairs of answers to one prompt in the episodes of a group, by turn and falling difference."""
    trajectories: list[Trajectory] = []
    for scored in group:
        for turn in turns_of(scored):
            pairs = _ranked(turn.candidates, lambda candidate: candidate.value, config, tally)
            made = [pair_of(turn, better, worse) for better, worse in pairs]
            if None in made:
                tally.left_out[SAME_RESPONSE] += made.count(None)
            trajectories += _limited([one for one in made if one is not None], config, tally)
    return trajectories


def _ranked(
    items: Sequence[T], value: Callable[[T], float], config: DpoBuilderConfig, tally: Tally
) -> list[tuple[T, T]]:
    """Pairs with the better one first, whose values differ enough, the clearest before the others."""
    order = sorted(items, key=lambda item: -value(item))
    if config.pairs == "best_vs_worst":
        order = [order[0], order[-1]] if len(order) > 1 else []
    kept: list[tuple[T, T]] = []
    for better, worse in combinations(order, 2):
        if value(better) == value(worse):
            tally.left_out[TIE] += 1
        elif value(better) - value(worse) < config.min_reward_diff - _TOLERANCE:
            tally.left_out[TOO_CLOSE] += 1
        else:
            kept.append((better, worse))
    return sorted(kept, key=lambda pair: value(pair[1]) - value(pair[0]))


def _limited(trajectories: list[Trajectory], config: DpoBuilderConfig, tally: Tally) -> list[Trajectory]:
    kept = trajectories[: config.max_pairs_per_group]
    if len(kept) < len(trajectories):
        tally.left_out[OVER_LIMIT] += len(trajectories) - len(kept)
    return kept


def _preferences(
    better: ScoredEpisode, worse: ScoredEpisode, tally: Tally
) -> Iterator[tuple[Branch, DPOItem]]:
    """A preference for each branch that both episodes have and began alike."""
    for good, bad in zip(better.branches, worse.branches, strict=False):
        if not same_prompt(good, bad):
            tally.left_out[OTHER_PROMPT] += 1
            continue
        item = preference(good, bad)
        if item is None:
            tally.left_out[SAME_RESPONSE] += 1
            continue
        yield good, item


def _trajectory(better: ScoredEpisode, worse: ScoredEpisode, branch: Branch, item: DPOItem) -> Trajectory:
    """The pair as a trajectory; its reward is the difference of the two rewards."""
    return Trajectory(
        episode=[item],
        reward=better.reward - worse.reward,
        metadata={
            "id": better.episode.example.id,
            "branch": branch.index,
            "chosen_episode": better.episode.id,
            "rejected_episode": worse.episode.id,
            "chosen_reward": better.reward,
            "rejected_reward": worse.reward,
            "turns": len(branch.calls),
            "temperature": branch.calls[0].request.sampling.temperature,
        },
    )


class DpoBuilder(CollectingBuilder):
    """Builds pairs of sibling episodes, or of sibling answers."""

    method: ClassVar[Method] = "dpo"

    def __init__(self, trajectory_builder_config: DpoBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trajectory_builder_config)
        self.dpo = trajectory_builder_config

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the `finetuning` block. Raises RequestError for groups in which there is never a pair."""
        await super().initialize(run_config)
        if self.dpo.compare == "episodes" and self.config.num_generations == 1:
            raise RequestError(
                "num_generations: 1 makes groups of one episode, in which there is no pair, so that DPO "
                "would learn nothing. Ask for at least 2; 8 is usual."
            )

    def build(self, group: Group, tally: Tally) -> list[Trajectory]:
        """See `dpo_trajectories`; of answers, `turn_preferences`."""
        if self.dpo.compare == "turns":
            return turn_preferences(group, self.dpo, tally)
        return dpo_trajectories(group, self.dpo, tally)

    def rewards_of_group(self, group: Group, trajectories: Sequence[Trajectory]) -> list[float]:
        """Those of the episodes, or the values of the answers."""
        if self.dpo.compare == "turns":
            return pair_rewards(trajectories)
        return super().rewards_of_group(group, trajectories)

    def parts_of(self, group: Group) -> list[Group]:
        """Answers in a play are worth what their agent earned; hence a group for each agent."""
        plays = [scored for scored in group if is_play(scored.episode)]
        if self.dpo.compare != "turns" or not plays:
            return super().parts_of(group)
        return [*by_agent(plays, self.run_config.target_functions, self.target_model)]


@register_trajectory_builder(config_type=DpoBuilderConfig)
async def dpo(config: DpoBuilderConfig, builder: Builder) -> AsyncIterator[DpoBuilder]:
    """The registered component `dpo`.

    Raises RequestError for answers of a protocol that are to be compared, and can never be.
    """
    if config.compare == "turns":
        remedy = "Set `workflow.widths: 2` or more, also by agent; or `compare: episodes`"
        await require_branching(builder, None, "`compare: turns`", remedy)
    yield DpoBuilder(config)
