"""GRPO data: every episode of an example, to be compared with its siblings.

Shao et al. (2024), DeepSeekMath: the advantage of an episode is its reward against those of the other
episodes of the same example. The learner computes it; here the groups are made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from etude.algorithms.candidates import Candidate, Turn, turns_of
from etude.algorithms.collecting import CollectingBuilder, CollectingConfig
from etude.algorithms.plays import tree_of, turn_returns
from etude.algorithms.protocol_checks import require_branching
from etude.algorithms.scored import Group, Tally
from etude.algorithms.transcript import trajectory_of
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

    credit: Literal["episode", "agent", "turn"] = Field(  # type: ignore[assignment]
        default="episode",
        description="`agent`: in a protocol, each agent of the model is compared with itself in the other "
        "episodes, by what it earned. `turn`: and each of its answers by what it earned from there on; "
        "where a play branches, with the other answers to the same prompt. `episode`: all have the "
        "episode's reward.",
    )
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


def turn_trajectories(group: Group, discount: float, drop_flat: bool, tally: Tally) -> list[list[Trajectory]]:
    """One agent's answers in the plays of a group, each with what was earned from it on.

    Where a play branches, the answers to one prompt are a group. The others make one group, in which
    an answer is compared with those of the same turn in the sibling plays.
    """
    groups: list[list[Trajectory]] = []
    whole: list[Trajectory] = []
    for scored in group:
        tree, agent = tree_of(scored.episode), str(scored.agent)
        for turn in turns_of(scored):
            groups.append([_answer(turn, candidate) for candidate in turn.candidates])
        for branch in scored.branches:
            returns = turn_returns(branch, tree, agent, discount)
            if returns is not None:
                facts = {"reasoning": scored.reasoning, "agent": agent}
                made = trajectory_of(branch, scored.episode, scored.reward, discount, facts)
                whole.append(made.model_copy(update={"shaped_rewards": returns}))
    kept = [one for one in [*groups, whole] if one]
    flat = [one for one in kept if drop_flat and _is_flat(one)]
    if flat:
        tally.left_out[EQUAL_REWARDS] += len(flat)
    return [one for one in kept if one not in flat]


def _answer(turn: Turn, candidate: Candidate) -> Trajectory:
    """One of several answers to a prompt; each counts as an episode of its own in the group."""
    episode = turn.scored.episode
    facts = {**turn.facts(), "episode": f"{episode.id}#{candidate.call.index}"}
    return trajectory_of(candidate.branch, episode, candidate.value, 1.0, facts).model_copy(
        update={"shaped_rewards": None}
    )


def _is_flat(trajectories: list[Trajectory]) -> bool:
    return len({(one.reward, tuple(one.shaped_rewards or ())) for one in trajectories}) == 1


class GrpoBuilder(CollectingBuilder):
    """Builds groups of sibling episodes."""

    method: ClassVar[Method] = "grpo"

    def __init__(self, trajectory_builder_config: GrpoBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trajectory_builder_config)
        self.grpo = trajectory_builder_config
        self.drop_flat_groups = trajectory_builder_config.drop_flat_groups

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Take the `finetuning` block. Raises RequestError for groups that can never have an advantage."""
        await super().initialize(run_config)
        alone = self.config.num_generations == 1 and self.grpo.credit != "turn"
        if alone and self.drop_flat_groups:
            raise RequestError(
                "num_generations: 1 makes groups of one episode, which have no advantage, so that GRPO would "
                "learn nothing. Ask for at least 2; 8 is usual."
            )

    def build(self, group: Group, tally: Tally) -> list[Trajectory]:
        """See `grpo_trajectories`."""
        return grpo_trajectories(group, self.config.discount, self.drop_flat_groups, tally)

    def build_all(self, groups: Sequence[Group], tally: Tally, epoch: int) -> list[list[Trajectory]]:
        """The groups; with `credit: turn` those of `turn_trajectories`."""
        if self.grpo.credit != "turn":
            return super().build_all(groups, tally, epoch)
        parts = [part for group in groups for part in self.parts_of(group)]
        return [
            made
            for part in parts
            for made in turn_trajectories(part, self.config.discount, self.drop_flat_groups, tally)
        ]


@register_trajectory_builder(config_type=GrpoBuilderConfig)
async def grpo(config: GrpoBuilderConfig, builder: Builder) -> AsyncIterator[GrpoBuilder]:
    """The registered component `grpo`.

    Raises RequestError for answers of a protocol that are to be compared, and can never be.
    """
    if config.credit == "turn" and config.num_generations == 1 and config.drop_flat_groups:
        remedy = "Set `num_generations`, or `workflow.widths`, to 2 or more"
        await require_branching(builder, None, "`credit: turn` with one play", remedy)
    yield GrpoBuilder(config)
