"""MALT: every turn of a play is answered several times, and good answers are preferred to bad ones.

Motwani et al. (2024). An answer's value is what its agent earned with it, plus the mean value of its
children. The number of leaves below a child does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from etude.algorithms.dpo import Dpo, Preferences
from etude.algorithms.episodes import Choice, Group, Tally, UnitGroup, by_agent, pair_answers
from etude.config.builder import Builder
from etude.config.references import ReferenceTo
from etude.core.errors import RequestError
from etude.core.sample import Pair, Sample
from etude.core.trajectory import Method
from etude.protocols.workflow import ProtocolWorkflow

NO_PAIR = "turn without answers on both sides of the threshold"
SAME_ANSWER = "pair of equal answers"

_TOLERANCE = 1e-9


class Malt(Preferences, name="malt"):
    """Pairs of answers to one prompt in a protocol, for DPO."""

    num_generations: int = Field(1, ge=1, le=1000, validation_alias=AliasChoices("num_generations", "group"))
    """Set the number of plays for each example of an epoch."""
    credit: Literal["episode", "agent"] = "agent"
    """Always `agent`: an answer is worth what its agent earned."""
    num_responses: int | list[int] | Annotated[dict[str, int | list[int]], ReferenceTo("agents")] | None = 2
    """Set the number of answers for each turn: a number, a list by round, or either of them by agent. Leave
    it empty for the workflow's setting."""
    interval: float | None = Field(default=None, ge=0, lt=1)
    """Pair two answers whose values differ by more than this share of what the agent can earn. Left out: pair
    an answer at or above the mid-point of that range with one below it."""

    def job_method(self) -> tuple[Method, dict[str, Any]]:
        """Return the loss of `dpo`."""
        return Dpo.type_name, self.gradient()

    @property
    def widths(self) -> Any:
        """The answers for each turn."""
        return self.num_responses

    async def check_protocol(self, builder: Builder) -> None:
        """Raise RequestError if the protocol does not say what agents can earn."""
        played = None if builder.config.workflow is None else (await builder.get_workflow()).fn
        if isinstance(played, ProtocolWorkflow) and not played.protocol.bounds:
            name = played.protocol.name
            raise RequestError(
                f"malt compares with what agents can earn: the protocol '{name}' needs `bounds`"
            )

    def groups(self, episodes: Sequence[Group], tally: Tally) -> list[UnitGroup]:
        """Return the pairs of each agent and example, judged by answer values."""
        parts = [part for group in episodes for part in by_agent(group)]
        return [UnitGroup.of_pairs(self.samples(part, tally)) for part in parts]

    def samples(self, group: Group, tally: Tally) -> Sequence[Pair]:
        """Return the pairs of one agent in the plays of a group: the clearest of each prompt."""
        pairs: list[Pair] = []
        for choice in self.choices(group, tally):
            ranked = sorted(self._rank_answers(choice), key=lambda pair: pair[1].reward - pair[0].reward)
            if not ranked:
                tally.left_out[NO_PAIR] += 1
            for better, worse in ranked:
                if (pair := pair_answers(better, worse)) is not None:
                    pairs.append(pair)
                    break
                tally.left_out[SAME_ANSWER] += 1
        return pairs

    def _rank_answers(self, choice: Choice) -> Iterator[tuple[Sample, Sample]]:
        """Yield the pairs that the rule allows, the better answer first."""
        low, high = choice.bounds or (0.0, 0.0)
        for first, second in combinations(choice.samples, 2):
            better, worse = (first, second) if first.reward >= second.reward else (second, first)
            middle = (low + high) / 2 - _TOLERANCE
            if self.interval is None:
                differ = better.reward >= middle > worse.reward
            else:
                differ = better.reward - worse.reward > self.interval * (high - low) + _TOLERANCE
            if differ:
                yield better, worse
