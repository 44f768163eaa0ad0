"""Expert iteration: keep the good episodes and imitate them.

Anthony et al. (2017); as rejection sampling on a model's own answers, Yuan et al. (2023).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from etude.builders.collecting import CollectingBuilder, CollectingConfig
from etude.builders.scored import Group, ScoredEpisode, Tally
from etude.builders.transcript import trajectory_of
from etude.config.registry import register_trajectory_builder
from etude.core.trajectory import Method, Trajectory

if TYPE_CHECKING:
    from etude.config.builder import Builder

BELOW = "episode with a reward below min_reward"
NOT_BEST = "episode that is not among its group's best"
NO_BEST = "group with equal rewards: no episode is better than another"


class ExpertIterationBuilderConfig(CollectingConfig, name="expert_iteration"):
    """Good episodes for supervised training."""

    min_reward: float | None = Field(default=None, description="Keep episodes with at least this reward.")
    best_k: int | None = Field(
        default=None,
        ge=1,
        description="Keep the best k episodes of each example; 1 when min_reward is not given either.",
    )


def best_episodes(
    group: Group, min_reward: float | None, best_k: int | None, tally: Tally
) -> list[ScoredEpisode]:
    """The episodes of a group to imitate, best first.

    Without `min_reward` a group whose rewards are all equal is left out: its best is also its worst.
    Equal rewards are told apart by generation.
    """
    if min_reward is None:
        best_k = best_k or 1
        if len({scored.reward for scored in group}) == 1:
            tally.left_out[NO_BEST] += 1
            return []
    good = [scored for scored in group if min_reward is None or scored.reward >= min_reward]
    kept = sorted(good, key=lambda scored: -scored.reward)[:best_k]
    if len(good) < len(group):
        tally.left_out[BELOW] += len(group) - len(good)
    if len(kept) < len(good):
        tally.left_out[NOT_BEST] += len(good) - len(kept)
    return kept


class ExpertIterationBuilder(CollectingBuilder):
    """Builds sets of episodes to imitate."""

    method: ClassVar[Method] = "supervised"

    def __init__(self, trajectory_builder_config: ExpertIterationBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trajectory_builder_config)
        self.min_reward = trajectory_builder_config.min_reward
        self.best_k = trajectory_builder_config.best_k

    def build(self, group: Group, tally: Tally) -> list[Trajectory]:
        """Every branch of the episodes that `best_episodes` keeps."""
        return [
            trajectory_of(
                branch, kept.episode, kept.reward, self.config.discount, {"reasoning": kept.reasoning}
            )
            for kept in best_episodes(group, self.min_reward, self.best_k, tally)
            for branch in kept.branches
        ]


@register_trajectory_builder(config_type=ExpertIterationBuilderConfig)
async def expert_iteration(
    config: ExpertIterationBuilderConfig, builder: Builder
) -> AsyncIterator[ExpertIterationBuilder]:
    """The registered component `expert_iteration`."""
    yield ExpertIterationBuilder(config)
