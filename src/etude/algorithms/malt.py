"""MALT: every turn of a play is answered several times, and good answers are preferred to bad ones.

Motwani et al. (2024). An answer's value is what its agent earned with it, and on average over what
followed: own reward plus the mean of the children's values, whatever the number of leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from etude.algorithms.collecting import played_by, require_branching
from etude.algorithms.dpo import Dpo, Preferences
from etude.algorithms.episodes import Candidate, Choice, Collected, Group, Tally, UnitGroup, by_agent
from etude.algorithms.imitation import SelectionConfig, Supervised, imitations
from etude.config.builder import Builder
from etude.config.references import Refers
from etude.core.errors import RequestError
from etude.core.sample import Pair
from etude.core.trajectory import Method
from etude.protocols.growing import Widths

NO_PAIR = "turn without answers on both sides of the threshold"
SAME_ANSWER = "pair of equal answers"

_TOLERANCE = 1e-9


class Malt(Preferences, name="malt"):
    """Pairs of answers to one prompt in a protocol, for DPO."""

    num_generations: int = Field(default=1, ge=1, validation_alias=AliasChoices("num_generations", "group"))
    """Plays for each example of an epoch."""
    credit: Literal["episode", "agent"] = "agent"
    """Always `agent`: answers are worth what their agent earned."""
    num_responses: int | list[int] | Annotated[dict[str, int | list[int]], Refers("agents")] | None = 2
    """Answers for each turn: a number, a list by round, or these by agent. Left empty: as the workflow has
    it."""
    pairs: Literal["sign", "interval"] = "sign"
    """`sign`: an answer at or above the mid-point of what the agent can earn against one below it.
    `interval`: two answers whose values differ by more than a share of that range."""
    interval: float = Field(default=0.5, ge=0, lt=1)
    """The share of the range, for `pairs: interval`."""
    initial_expert_iterations: int = Field(default=0, ge=0)
    """First epochs of expert iteration on plays that do not branch."""
    expert_iteration: SelectionConfig = Field(
        default_factory=lambda: SelectionConfig(min_reward=0.9), description="What these epochs imitate."
    )

    def method_at(self, epoch: int) -> tuple[Method, dict[str, Any]]:
        """The loss of `supervised` in the first epochs, then that of `dpo`."""
        return (Supervised.type_name, {}) if self.imitates(epoch) else (Dpo.type_name, self.gradient())

    @property
    def methods(self) -> tuple[Method, ...]:
        """`supervised` too when there are epochs of expert iteration."""
        first = (Supervised.type_name,) if self.initial_expert_iterations else ()
        return (*first, Dpo.type_name)

    def widths(self, epoch: int) -> Any:
        """One answer each in the first epochs, then as many as `num_responses` says."""
        return 1 if self.imitates(epoch) else self.num_responses

    def imitates(self, epoch: int) -> bool:
        """Whether the epoch is one of expert iteration."""
        return epoch < self.initial_expert_iterations

    async def check_protocol(self, builder: Builder) -> None:
        """Raise RequestError for answers of a protocol that are to be compared, and can never be."""
        played = await played_by(builder)
        if played is not None and not played.protocol.bounds:
            name = played.protocol.name
            raise RequestError(f"malt compares with what agents can earn: '{name}' has to say its `bounds`")
        widths = None if self.num_responses is None else Widths.of(self.num_responses)
        where = "num_responses" if widths else "workflow.widths"
        remedy = f"Set `{where}` to 2 or more for one of them"
        await require_branching(builder, widths, "`_type: malt`", remedy)

    def groups(self, episodes: Sequence[Group], collected: Collected) -> list[UnitGroup]:
        """For each agent and example its pairs, judged by their answers' values; or plays to imitate."""
        parts = [part for group in episodes for part in by_agent(group)]
        if self.imitates(collected.epoch):
            return imitations(parts, self.expert_iteration, self.discount, collected)
        return [UnitGroup.of_pairs(self.samples(part, collected.tally)) for part in parts]

    def samples(self, group: Group, tally: Tally) -> Sequence[Pair]:
        """The pairs of one agent in the plays of a group."""
        return [
            pair
            for scored in group
            for choice in self.choices(scored)
            for pair in self._pairs_of(choice, tally)
        ]

    def _pairs_of(self, choice: Choice, tally: Tally) -> Iterator[Pair]:
        ranked = sorted(self._ranked(choice), key=lambda pair: pair[1].value - pair[0].value)
        if not ranked:
            tally.left_out[NO_PAIR] += 1
        for better, worse in ranked:
            if (pair := choice.pair(better, worse)) is not None:
                yield pair
                return
            tally.left_out[SAME_ANSWER] += 1

    def _ranked(self, choice: Choice) -> Iterator[tuple[Candidate, Candidate]]:
        """The pairs that the rule makes, the better answer first."""
        low, high = choice.bounds or (0.0, 0.0)
        for first, second in combinations(choice.candidates, 2):
            better, worse = (first, second) if first.value >= second.value else (second, first)
            middle = (low + high) / 2 - _TOLERANCE
            apart = better.value - worse.value > self.interval * (high - low) + _TOLERANCE
            if better.value >= middle > worse.value if self.pairs == "sign" else apart:
                yield better, worse
