"""Bounds: the least and the most that an agent can earn in a play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from etude.protocols.decision import VERDICTS
from etude.protocols.outcome import outcomes

if TYPE_CHECKING:
    from etude.protocols.protocol import Protocol

Bounds: TypeAlias = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Totals:
    """The least and the most that each agent has earned."""

    low: Mapping[str, float]
    high: Mapping[str, float]

    def plus(self, earned: Mapping[str, float]) -> Totals:
        """After a round that can only earn this."""
        return Totals(
            {agent: value + earned.get(agent, 0.0) for agent, value in self.low.items()},
            {agent: value + earned.get(agent, 0.0) for agent, value in self.high.items()},
        )

    def joined(self, other: Totals) -> Totals:
        """After either."""
        return Totals(
            {agent: min(value, other.low[agent]) for agent, value in self.low.items()},
            {agent: max(value, other.high[agent]) for agent, value in self.high.items()},
        )


def earned_in_a_play(protocol: Protocol) -> dict[str, tuple[float, float]]:
    """The least and the most that each agent can earn in a whole play, over everything that can happen."""
    found: Totals | None = None
    for rounds, truth, stance in product(protocol.schedules, VERDICTS, VERDICTS):
        nothing = dict.fromkeys(protocol.agents, 0.0)
        so_far = Totals(nothing, nothing)
        for number, turns in enumerate(rounds, 1):
            going_on: Totals | None = None
            for outcome in outcomes(protocol, turns, last=number == len(rounds), truth=truth, stance=stance):
                after = so_far.plus(protocol.payoff(outcome))
                if outcome.over:
                    found = after if found is None else found.joined(after)
                else:
                    going_on = after if going_on is None else going_on.joined(after)
            if going_on is None:
                break
            so_far = going_on
    assert found is not None, "a checked protocol has a schedule with an end"
    return {agent: (found.low[agent], found.high[agent]) for agent in protocol.agents}
