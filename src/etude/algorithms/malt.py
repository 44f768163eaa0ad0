"""MALT: every turn of a play is answered several times, and good answers are preferred to bad ones.

Motwani et al. (2024). An answer's value is what its agent earned with it, and on average over what
followed: own reward plus the mean of the children's values, whatever the number of leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from etude.algorithms.candidates import Candidate, Turn, pair_of, pair_rewards, turns_of
from etude.algorithms.collecting import CollectingBuilder, CollectingConfig
from etude.algorithms.expert_iteration import SelectionConfig, imitations
from etude.algorithms.plays import by_agent
from etude.algorithms.protocol_checks import require_branching, require_calls, require_guesses
from etude.algorithms.scored import Group, Tally
from etude.config.references import RefersToAgent
from etude.config.registry import register_trajectory_builder
from etude.core.keys import fold
from etude.core.trajectory import Method, Trajectory
from etude.protocols.growing import Widths

if TYPE_CHECKING:
    from etude.config.builder import Builder

NO_PAIR = "turn without answers on both sides of the threshold"
SAME_ANSWER = "pair of equal answers"

Pair = tuple[Candidate, Candidate]
"""Better answer, worse answer."""

_TOLERANCE = 1e-9


class MaltBuilderConfig(CollectingConfig, name="malt"):
    """Pairs of answers to one prompt in a protocol, for DPO."""

    num_generations: int = Field(default=1, ge=1, description="Plays for each example of an epoch.")
    credit: Literal["episode", "agent"] = Field(
        default="agent", description="Always `agent`: answers are worth what their agent earned."
    )
    num_responses: int | list[int] | Annotated[dict[str, int | list[int]], RefersToAgent()] | None = Field(
        default=2,
        description="Answers for each turn: a number, a list by round, or these by agent. Left empty: as the "
        "workflow has it.",
    )
    pairs: Literal["sign", "interval"] = Field(
        default="sign",
        description="`sign`: an answer at or above the mid-point of what the agent can earn against one "
        "below it. `interval`: two answers whose values differ by more than a share of that range.",
    )
    interval: float = Field(
        default=0.5, ge=0, lt=1, description="The share of the range, for `pairs: interval`."
    )
    per_turn: Literal["one", "all"] = Field(
        default="one", description="Of a turn's pairs, the clearest one or all of them."
    )
    initial_expert_iterations: int = Field(
        default=0, ge=0, description="First epochs of expert iteration on plays that do not branch."
    )
    expert_iteration: SelectionConfig = Field(
        default_factory=lambda: SelectionConfig(min_reward=0.9), description="What these epochs imitate."
    )


def malt_trajectories(group: Group, config: MaltBuilderConfig, tally: Tally) -> list[Trajectory]:
    """The pairs of one agent in the plays of a group, one trajectory each."""
    return [
        trajectory
        for scored in group
        for turn in turns_of(scored)
        for trajectory in _pairs_of_turn(turn, config, tally)
    ]


def _pairs_of_turn(turn: Turn, config: MaltBuilderConfig, tally: Tally) -> Iterator[Trajectory]:
    pairs = sorted(_ranked(turn, config), key=lambda pair: pair[1].value - pair[0].value)
    if not pairs:
        tally.left_out[NO_PAIR] += 1
    for better, worse in pairs:
        trajectory = pair_of(turn, better, worse)
        if trajectory is None:
            tally.left_out[SAME_ANSWER] += 1
            continue
        yield trajectory
        if config.per_turn == "one":
            return


def _ranked(turn: Turn, config: MaltBuilderConfig) -> Iterator[Pair]:
    """The pairs that the rule makes, the better answer first."""
    low, high = turn.bounds or (0.0, 0.0)
    for one, other in combinations(turn.candidates, 2):
        better, worse = (one, other) if one.value >= other.value else (other, one)
        if config.pairs == "sign":
            middle = (low + high) / 2
            is_pair = better.value >= middle - _TOLERANCE and worse.value < middle - _TOLERANCE
        else:
            is_pair = better.value - worse.value > config.interval * (high - low) + _TOLERANCE
        if is_pair:
            yield better, worse


class MaltBuilder(CollectingBuilder):
    """Builds pairs of answers, after first epochs of expert iteration where the config says so."""

    method: ClassVar[Method] = "dpo"

    def __init__(self, trajectory_builder_config: MaltBuilderConfig) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trajectory_builder_config)
        self.malt = trajectory_builder_config

    @property
    def methods(self) -> tuple[Method, ...]:
        """`supervised` too when there are epochs of expert iteration."""
        return ("supervised", "dpo") if self.malt.initial_expert_iterations else ("dpo",)

    def method_of(self, epoch: int) -> Method:
        """`supervised` in the first epochs, then `dpo`."""
        return "supervised" if self._imitates(epoch) else "dpo"

    def widths_of(self, epoch: int) -> Any:
        """One answer each in the first epochs, then as many as the config says."""
        return 1 if self._imitates(epoch) else self.malt.num_responses

    def parts_of(self, group: Group) -> list[Group]:
        """A group for each agent."""
        return [*by_agent(group, self.run_config.target_functions, self.target_model)]

    def build(self, group: Group, tally: Tally) -> list[Trajectory]:
        """See `malt_trajectories`."""
        return malt_trajectories(group, self.malt, tally)

    def rewards_of_group(self, group: Group, trajectories: Sequence[Trajectory]) -> list[float]:
        """The values of the answers: a single play has them too."""
        return pair_rewards(trajectories)

    def build_all(self, groups: Sequence[Group], tally: Tally, epoch: int) -> list[list[Trajectory]]:
        """Pairs, or in the first epochs plays to imitate."""
        if not self._imitates(epoch):
            return super().build_all(groups, tally, epoch)
        parts = [part for group in groups for part in self.parts_of(group)]
        seed = fold(self.run_config.seed, "expert iteration", epoch)
        return imitations(parts, self.malt.expert_iteration, self.config.discount, epoch, seed, tally)

    def _imitates(self, epoch: int) -> bool:
        return epoch < self.malt.initial_expert_iterations


@register_trajectory_builder(config_type=MaltBuilderConfig)
async def malt(config: MaltBuilderConfig, builder: Builder) -> AsyncIterator[MaltBuilder]:
    """The registered component `malt`.

    Raises RequestError for answers of a protocol that are to be compared, and can never be, and for
    guesses that cannot be replaced.
    """
    widths = None if config.num_responses is None else Widths.of(config.num_responses)
    where = "num_responses" if widths else "workflow.widths"
    await require_branching(builder, widths, "`_type: malt`", f"Set `{where}` to 2 or more for one of them")
    await require_calls(builder, widths)
    if config.initial_expert_iterations and config.expert_iteration.guess_replacement.proportion:
        await require_guesses(builder)
    yield MaltBuilder(config)
