"""DPO data: pairs of episodes of one example, the better one chosen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from etude.builders.branches import Branch
from etude.builders.collecting import CollectingBuilder, CollectingConfig
from etude.builders.preferences import preference, same_prompt
from etude.builders.scored import Group, ScoredEpisode, Tally
from etude.config.registry import register_trajectory_builder
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

Ranked = tuple[ScoredEpisode, ScoredEpisode]
"""Better episode, worse episode."""


class DpoBuilderConfig(CollectingConfig, name="dpo"):
    """Pairs of episodes for DPO."""

    pairs: Literal["all", "best_vs_worst"] = Field(
        default="all", description="Pair every two episodes of an example, or only its best and its worst."
    )
    min_reward_diff: float = Field(
        default=0.01, gt=0, description="Pairs whose rewards differ by less are left out; ties always are."
    )
    max_pairs_per_group: int | None = Field(
        default=None, ge=1, description="Keep at most this many pairs of an example: the clearest."
    )


def dpo_trajectories(group: Group, config: DpoBuilderConfig, tally: Tally) -> list[Trajectory]:
    """The pairs of a group, by falling reward difference, one trajectory each."""
    ranked = sorted(_ranked(group, config, tally), key=lambda pair: pair[1].reward - pair[0].reward)
    trajectories = [
        _trajectory(better, worse, branch, item)
        for better, worse in ranked
        for branch, item in _preferences(better, worse, tally)
    ]
    kept = trajectories[: config.max_pairs_per_group]
    if len(kept) < len(trajectories):
        tally.left_out[OVER_LIMIT] += len(trajectories) - len(kept)
    return kept


def _ranked(group: Group, config: DpoBuilderConfig, tally: Tally) -> Iterator[Ranked]:
    """Pairs with the better episode first, whose rewards differ enough."""
    order = sorted(group, key=lambda scored: -scored.reward)
    if config.pairs == "best_vs_worst":
        order = [order[0], order[-1]] if len(order) > 1 else []
    for better, worse in combinations(order, 2):
        if better.reward == worse.reward:
            tally.left_out[TIE] += 1
        elif better.reward - worse.reward < config.min_reward_diff - _TOLERANCE:
            tally.left_out[TOO_CLOSE] += 1
        else:
            yield better, worse


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
    """Builds pairs of sibling episodes."""

    method: ClassVar[Method] = "dpo"

    def __init__(self, trajectory_builder_config: DpoBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trajectory_builder_config)
        self.dpo = trajectory_builder_config

    def build(self, group: Group, tally: Tally) -> list[Trajectory]:
        """See `dpo_trajectories`."""
        return dpo_trajectories(group, self.dpo, tally)


@register_trajectory_builder(config_type=DpoBuilderConfig)
async def dpo(config: DpoBuilderConfig, builder: Builder) -> AsyncIterator[DpoBuilder]:
    """The registered component `dpo`."""
    yield DpoBuilder(config)
