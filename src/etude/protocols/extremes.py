"""Extremes: the least and the most that each agent has earned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extremes:
    """Over everything that can have happened, by agent."""

    low: Mapping[str, float]
    high: Mapping[str, float]

    @classmethod
    def nothing(cls, agents: Iterable[str]) -> Extremes:
        """Before the first round."""
        zero = dict.fromkeys(agents, 0.0)
        return cls(zero, zero)

    def plus(self, other: Extremes) -> Extremes:
        """One after the other."""
        return Extremes(
            {agent: value + other.low[agent] for agent, value in self.low.items()},
            {agent: value + other.high[agent] for agent, value in self.high.items()},
        )

    def joined(self, other: Extremes) -> Extremes:
        """Either."""
        return Extremes(
            {agent: min(value, other.low[agent]) for agent, value in self.low.items()},
            {agent: max(value, other.high[agent]) for agent, value in self.high.items()},
        )

    def bounds(self) -> dict[str, tuple[float, float]]:
        """The least and the most, by agent."""
        return {agent: (self.low[agent], self.high[agent]) for agent in self.low}


def joined_with(before: Extremes | None, earned: Mapping[str, float], agents: Iterable[str]) -> Extremes:
    """Either what was before, or earning this; agents that are left out earn nothing."""
    each = {agent: float(earned.get(agent, 0.0)) for agent in agents}
    new = Extremes(each, each)
    return new if before is None else before.joined(new)
