"""Expert iteration: keep the good episodes and imitate them.

Anthony et al. (2017); as rejection sampling on a model's own answers, Yuan et al. (2023).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.algorithms.collecting import CollectingBuilder, CollectingConfig, with_group_rewards
from etude.algorithms.imitation import (
    NOT_DRAWN,
    GuessReplacementConfig,
    WeightingConfig,
    best_episodes,
    draw,
    guess_of,
    with_truth,
)
from etude.algorithms.protocol_checks import require_guesses
from etude.algorithms.scored import Group, ScoredEpisode, Tally, rewards_of
from etude.algorithms.transcript import trajectory_of
from etude.config.registry import register_trajectory_builder
from etude.core.keys import fold, generator
from etude.core.trajectory import Method, Trajectory

if TYPE_CHECKING:
    from etude.config.builder import Builder


class SelectionConfig(BaseModel):
    """Which episodes are imitated."""

    model_config = ConfigDict(extra="forbid")

    min_reward: float | None = Field(default=None, description="Keep episodes with at least this reward.")
    best_k: int | None = Field(
        default=None,
        ge=1,
        description="Keep the best k episodes of each example; 1 when min_reward is not given either.",
    )
    weighting: WeightingConfig | None = Field(
        default=None, description="Draw from all episodes by weight, in place of the two above."
    )
    guess_replacement: GuessReplacementConfig = Field(
        default_factory=GuessReplacementConfig, description="Decisions replaced by the truth."
    )


class ExpertIterationBuilderConfig(CollectingConfig, SelectionConfig, name="expert_iteration"):
    """Good episodes for supervised training."""

    rollouts: Literal["this_epoch", "all"] = Field(
        default="this_epoch", description="`all`: select from the episodes of earlier epochs too."
    )


def imitations(
    groups: Sequence[Group], config: SelectionConfig, discount: float, epoch: int, seed: int, tally: Tally
) -> list[list[Trajectory]]:
    """The trajectories to imitate, by group. Each agent's episodes are selected from by themselves."""
    made: list[list[Trajectory]] = [[] for _ in groups]
    for agent in {scored.agent: None for group in groups for scored in group}:
        own = {
            place: [scored for scored in group if scored.agent == agent] for place, group in enumerate(groups)
        }
        guesses = _guesses(own, config.guess_replacement, epoch, fold(seed, str(agent), "guess"))
        for place, scored in guesses:
            guess = guess_of(scored)
            assert guess is not None
            facts = {"reasoning": scored.reasoning}
            trajectory = trajectory_of(guess.branch, scored.episode, scored.reward, discount, facts)
            made[place].append(with_truth(trajectory, guess))
            own[place].remove(scored)
        for place, scored in _selected(own, config, fold(seed, str(agent), "draw"), tally):
            made[place] += [
                trajectory_of(
                    branch, scored.episode, scored.reward, discount, {"reasoning": scored.reasoning}
                )
                for branch in scored.branches
            ]
    return [
        with_group_rewards(trajectories, rewards_of(group))
        for trajectories, group in zip(made, groups, strict=True)
    ]


Places = dict[int, list[ScoredEpisode]]
"""Scored episodes by the place of their group."""


def _guesses(
    own: Places, config: GuessReplacementConfig, epoch: int, seed: int
) -> list[tuple[int, ScoredEpisode]]:
    """The episodes whose decision is replaced: a share of all, drawn from those that have one."""
    count = int(config.share(epoch) * sum(map(len, own.values())))
    if not count:
        return []
    with_guess = [
        (place, scored) for place, group in own.items() for scored in group if guess_of(scored) is not None
    ]
    generator(seed).shuffle(with_guess)
    return with_guess[:count]


def _selected(
    own: Places, config: SelectionConfig, seed: int, tally: Tally
) -> list[tuple[int, ScoredEpisode]]:
    if config.weighting is None:
        return [
            (place, scored)
            for place, group in own.items()
            if group
            for scored in best_episodes(group, config.min_reward, config.best_k, tally)
        ]
    pool = [(place, scored) for place, group in own.items() for scored in group]
    drawn = draw([scored.reward for _, scored in pool], config.weighting, generator(seed))
    if len(set(drawn)) < len(pool):
        tally.left_out[NOT_DRAWN] += len(pool) - len(set(drawn))
    return [pool[index] for index in drawn]


class ExpertIterationBuilder(CollectingBuilder):
    """Builds sets of episodes to imitate."""

    method: ClassVar[Method] = "supervised"

    def __init__(self, trajectory_builder_config: ExpertIterationBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trajectory_builder_config)
        self.selection = trajectory_builder_config

    def build(self, group: Group, tally: Tally) -> list[Trajectory]:
        """What is imitated of one group by itself."""
        return imitations([group], self.selection, self.config.discount, 0, self.run_config.seed, tally)[0]

    def build_all(self, groups: Sequence[Group], tally: Tally, epoch: int) -> list[list[Trajectory]]:
        """See `imitations`."""
        parts = [part for group in groups for part in self.parts_of(group)]
        seed = fold(self.run_config.seed, "expert iteration", epoch)
        return imitations(parts, self.selection, self.config.discount, epoch, seed, tally)

    async def earlier_groups(self, epoch: int, meta: dict[str, Any]) -> list[list[ScoredEpisode]]:
        """The episodes of all earlier epochs, where the config asks for them."""
        if self.selection.rollouts == "this_epoch":
            return []
        return [group for earlier in range(epoch) for group in await self.stored_groups(earlier, meta)]


@register_trajectory_builder(config_type=ExpertIterationBuilderConfig)
async def expert_iteration(
    config: ExpertIterationBuilderConfig, builder: Builder
) -> AsyncIterator[ExpertIterationBuilder]:
    """The registered component `expert_iteration`.

    Raises RequestError for guesses of a protocol that are to be replaced, and cannot be.
    """
    if config.guess_replacement.proportion:
        await require_guesses(builder)
    yield ExpertIterationBuilder(config)
