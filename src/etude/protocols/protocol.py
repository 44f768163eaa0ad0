"""A protocol as data: who speaks when, who hears it, who decides, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from etude.protocols.bounds import Bounds, earned_in_a_play
from etude.protocols.checks import check_protocol
from etude.protocols.decision import Verdict
from etude.protocols.outcome import Payoff
from etude.protocols.turn import Role, Round


@dataclass(frozen=True)
class Protocol:
    """A multi-agent exchange as data. It cannot be built wrong.

    Raises RequestError for two writers on a channel in one round, a writer that cannot read its channel,
    a deciding turn of an agent that may not decide, a schedule that does not end in a must-decide turn,
    payoffs outside the bounds, and names that are not there.
    """

    name: str
    agents: Mapping[str, Role]
    channels: Mapping[str, frozenset[str]]
    """The readers of each channel."""
    schedules: tuple[tuple[Round, ...], ...]
    """The rounds. Where there are several schedules, each play draws one of them."""
    payoff: Payoff
    bounds: Bounds = field(default_factory=dict)
    """The least and the most that each agent can earn in a play; worked out when left empty."""
    shuffle_channels: bool = False
    """Whether the channels of a round are read in an order that is drawn anew for each round."""
    forced: Literal["accept", "reject", "truth"] | None = None
    """Takes the place of every decision, and of a last turn without one."""

    def __post_init__(self) -> None:
        """Freeze the mappings, then check everything."""
        readers = {channel: frozenset(names) for channel, names in self.channels.items()}
        object.__setattr__(self, "agents", MappingProxyType(dict(self.agents)))
        object.__setattr__(self, "channels", MappingProxyType(readers))
        object.__setattr__(self, "schedules", tuple(tuple(map(tuple, rounds)) for rounds in self.schedules))
        check_protocol(self)
        object.__setattr__(self, "bounds", MappingProxyType(dict(self.bounds) or earned_in_a_play(self)))

    @property
    def max_rounds(self) -> int:
        """Rounds of the longest schedule."""
        return max(len(rounds) for rounds in self.schedules)

    @property
    def min_rounds(self) -> int:
        """Rounds after which a decision can come at the earliest."""
        return min(
            number
            for rounds in self.schedules
            for number, turns in enumerate(rounds, 1)
            if any(turn.decide != "no" for turn in turns)
        )

    def rounds(self, key: int) -> tuple[Round, ...]:
        """The schedule of the play with this key."""
        return self.schedules[key % len(self.schedules)]

    def writers(self, channel: str) -> frozenset[str]:
        """The agents with a turn that writes on a channel."""
        return self._writers[channel]

    def label(self, agent: str) -> str:
        """What others call an agent."""
        return self.agents[agent].label or agent

    def stance_of(self, agent: str, stance: Verdict) -> Verdict | None:
        """The verdict that an agent argues for on an example with that stance."""
        own = self.agents[agent].stance
        return stance if own == "example" else own

    def mid_point(self, agent: str) -> float:
        """Half-way between the least and the most that an agent can earn."""
        low, high = self.bounds[agent]
        return (low + high) / 2

    @cached_property
    def _writers(self) -> Mapping[str, frozenset[str]]:
        turns = [turn for rounds in self.schedules for turns in rounds for turn in turns]
        return {
            channel: frozenset(turn.agent for turn in turns if channel in turn.writes)
            for channel in self.channels
        }
