"""GRPO data: every episode of an example, to be compared with its siblings.

Shao et al. (2024), DeepSeekMath: the advantage of an episode is its reward against those of the other
episodes of the same example. The learner computes it; here the groups are made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from etude.builders.collecting import CollectingBuilder, CollectingConfig
from etude.builders.scored import Group, Tally
from etude.builders.transcript import trajectory_of
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trajectory_builder
from etude.core.errors import RequestError
from etude.core.trajectory import Method, Trajectory

if TYPE_CHECKING:
    from etude.config.builder import Builder

GROUP_OF_ONE = "group of one episode: nothing to compare it with"
EQUAL_REWARDS = "group with equal rewards: no advantage"


class GrpoBuilderConfig(CollectingConfig, name="grpo"):
    """Groups of episodes for GRPO."""

    drop_flat_groups: bool = Field(
        default=True,
        description="Leave out groups whose rewards are all equal: they have no advantage and teach nothing.",
    )


def grpo_trajectories(group: Group, discount: float, drop_flat: bool, tally: Tally) -> list[Trajectory]:
    """Every branch of every episode of a group; nothing when the group has no advantage."""
    trajectories = [
        trajectory_of(branch, scored.episode, scored.reward, discount, {"reasoning": scored.reasoning})
        for scored in group
        for branch in scored.branches
    ]
    if drop_flat and len(group) == 1:
        tally.left_out[GROUP_OF_ONE] += 1
        return []
    if drop_flat and _is_flat(trajectories):
        tally.left_out[EQUAL_REWARDS] += 1
        return []
    return trajectories


def _is_flat(trajectories: list[Trajectory]) -> bool:
    return len({(one.reward, tuple(one.shaped_rewards or ())) for one in trajectories}) == 1


class GrpoBuilder(CollectingBuilder):
    """Builds groups of sibling episodes."""

    method: ClassVar[Method] = "grpo"

    def __init__(self, trajectory_builder_config: GrpoBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trajectory_builder_config)
        self.drop_flat_groups = trajectory_builder_config.drop_flat_groups

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the `finetuning` block. Raises RequestError for groups that can never have an advantage."""
        await super().initialize(run_config)
        if self.config.num_generations == 1 and self.drop_flat_groups:
            raise RequestError(
                "num_generations: 1 makes groups of one episode, which have no advantage, so that GRPO would "
                "learn nothing. Ask for at least 2; 8 is usual."
            )

    def build(self, group: Group, tally: Tally) -> list[Trajectory]:
        """See `grpo_trajectories`."""
        return grpo_trajectories(group, self.config.discount, self.drop_flat_groups, tally)


@register_trajectory_builder(config_type=GrpoBuilderConfig)
async def grpo(config: GrpoBuilderConfig, builder: Builder) -> AsyncIterator[GrpoBuilder]:
    """The registered component `grpo`."""
    yield GrpoBuilder(config)
