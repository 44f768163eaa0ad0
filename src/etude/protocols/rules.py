"""The rules of a protocol, as they were given; `Protocol` is rules that were checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeAlias

from etude.core.errors import RequestError
from etude.core.keys import fold
from etude.protocols.decision import ACCEPT, REJECT, Verdict
from etude.protocols.outcome import Payoff
from etude.protocols.turn import Fork, Role, Schedule, Turn, turns_at
from etude.protocols.vote import Vote

Bounds: TypeAlias = Mapping[str, tuple[float, float]]
"""The least and the most that each agent can earn in a play."""


@dataclass(frozen=True)
class Rules:
    """Who speaks when, who hears it, who decides, and what it is worth."""

    name: str
    agents: Mapping[str, Role]
    channels: Mapping[str, frozenset[str]]
    """The readers of each channel."""
    schedules: tuple[Schedule, ...]
    """The rounds. Where there are several schedules, each play draws one of them."""
    payoff: Payoff
    bounds: Bounds = field(default_factory=dict)
    """The least and the most that each agent can earn in a play; worked out when left empty."""
    shuffle_channels: bool = False
    """Whether the channels of a round are read in an order that is drawn anew for each round."""
    forced: Literal["accept", "reject", "truth"] | None = None
    """Takes the place of every decision, and of a last turn without one."""
    vote: Vote | None = None
    """What the ballots of several agents come to. Without it, one agent may decide in a round, and the
    first decision is the verdict."""
    needs_verdict: bool = True
    """Whether the last round has to bring a verdict. Otherwise a play may just end, with none."""

    def __post_init__(self) -> None:
        """Freeze the mappings."""
        readers = {channel: frozenset(names) for channel, names in self.channels.items()}
        schedules = tuple(
            tuple(stage if isinstance(stage, Fork) else tuple(stage) for stage in schedule)
            for schedule in self.schedules
        )
        object.__setattr__(self, "agents", MappingProxyType(dict(self.agents)))
        object.__setattr__(self, "channels", MappingProxyType(readers))
        object.__setattr__(self, "schedules", schedules)

    @property
    def max_rounds(self) -> int:
        """Rounds of the longest schedule."""
        return max(len(schedule) for schedule in self.schedules)

    @property
    def min_rounds(self) -> int:
        """Rounds after which a decision can come at the earliest; all of them where nobody decides."""
        deciding = [
            number
            for schedule in self.schedules
            for number, stage in enumerate(schedule, 1)
            if any(turn.decide != "no" for turn in turns_at(stage))
        ]
        return min(deciding, default=self.max_rounds)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns that there can be, in the order of the schedules."""
        return tuple(turn for schedule in self.schedules for stage in schedule for turn in turns_at(stage))

    def rounds(self, key: int) -> Schedule:
        """The schedule of the play with this key."""
        return self.schedules[key % len(self.schedules)]

    def writers(self, channel: str) -> frozenset[str]:
        """The agents with a turn that writes on a channel."""
        return self._writers[channel]

    def label(self, agent: str) -> str:
        """What others call an agent."""
        return self.agents[agent].label or agent

    def stance_of(self, agent: str, stance: Verdict, drawn: Verdict = ACCEPT) -> Verdict | None:
        """The verdict that an agent argues for on an example with that stance, when `drawn` was drawn."""
        match self.agents[agent].stance:
            case "example":
                return stance
            case "drawn":
                return drawn
            case "opposed":
                return REJECT if drawn == ACCEPT else ACCEPT
            case own:
                return own

    def sides(self, stance: Verdict, drawn: Verdict) -> dict[str, Verdict]:
        """The verdict that each agent argues for; those that argue for nothing are left out."""
        sides = {agent: self.stance_of(agent, stance, drawn) for agent in self.agents}
        return {agent: side for agent, side in sides.items() if side is not None}

    @property
    def draws_sides(self) -> bool:
        """Whether a coin is tossed for each play."""
        return any(role.stance in ("drawn", "opposed") for role in self.agents.values())

    def mid_point(self, agent: str) -> float:
        """Half-way between the least and the most that an agent can earn."""
        low, high = self.bounds[agent]
        return (low + high) / 2

    @cached_property
    def _writers(self) -> Mapping[str, frozenset[str]]:
        return {
            channel: frozenset(turn.agent for turn in self.turns if channel in turn.writes)
            for channel in self.channels
        }


def wrong(rules: Rules, what: str) -> RequestError:
    """The error for rules that no protocol can have."""
    return RequestError(f"protocol '{rules.name}': {what}")


def drawn_side(key: int) -> Verdict:
    """The side that the coin shows in the play with this key, along all of its branches."""
    return ACCEPT if fold(key, "side") % 2 else REJECT


def voters_of(rules: Rules, schedule: Schedule) -> tuple[str, ...]:
    """The agents with a turn to decide in a schedule, in the order of the protocol."""
    deciding = {turn.agent for stage in schedule for turn in turns_at(stage) if turn.decide != "no"}
    return tuple(agent for agent in rules.agents if agent in deciding)
