"""A turn: an agent's chance to speak or to decide, the role that it speaks in, and rounds of turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from etude.protocols.decision import ACCEPT_REJECT, Scale
from etude.protocols.said import PlayLog

Decides: TypeAlias = Literal["no", "may", "must"]
Stance: TypeAlias = Literal[0, 1, "example", "drawn", "opposed"]
"""The verdict that an agent argues for. `example` leaves it to each example, `drawn` to a coin that is
tossed for each play, and `opposed` is the side that the coin did not show."""
STANCES: tuple[Stance, ...] = (0, 1, "example", "drawn", "opposed")


@dataclass(frozen=True, slots=True)
class Role:
    """What an agent is in a protocol."""

    kind: str
    """`prover`, `verifier`, or a word of your own."""
    may_decide: bool = False
    stance: Stance | None = None
    """None for an agent that argues for nothing."""
    label: str = ""
    """What others call it in prompts; empty for the agent's name."""
    anonymous: bool = False
    """Whether others are not told who speaks."""
    must_be_valid: bool = False
    """Whether the play ends when its answer stays malformed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An agent's turn: the channels it writes on, and whether it may or must decide instead."""

    agent: str
    writes: tuple[str, ...] = ()
    decide: Decides = "no"
    scale: Scale = ACCEPT_REJECT
    """The answers that count as a decision."""
    headers: tuple[str, ...] = ()
    """Where a turn writes on several channels: what an answer's part for each of `writes` starts with."""
    open: bool = False
    """Whether a decision is told on the channels that the turn writes on: an open ballot. Otherwise
    nobody hears it, nor what was said beside it."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The channels with their headers; by default a header is the channel's name and a colon."""
        headers = self.headers or tuple(f"{channel}:" for channel in self.writes)
        return tuple(zip(self.writes, headers, strict=True))


Round: TypeAlias = tuple[Turn, ...]
"""Turns that are taken at the same time: none of them sees another."""


@dataclass(frozen=True, eq=False)
class Fork:
    """A round that is chosen by what was said so far.

    What can be chosen is data, and is checked like any round; only the choice waits for the play.
    """

    choose: Callable[[PlayLog], str]
    """The name of an option, of what was said before the round: a pure function."""
    options: Mapping[str, Round]
    """The rounds that there are to choose from, by name; an empty one passes without a turn."""

    def __post_init__(self) -> None:
        """Freeze the options."""
        frozen = {name: tuple(turns) for name, turns in self.options.items()}
        object.__setattr__(self, "options", MappingProxyType(frozen))


Stage: TypeAlias = Round | Fork
"""One step of a schedule."""

Schedule: TypeAlias = tuple[Stage, ...]
"""The rounds of a play, in order."""


def rounds_at(stage: Stage) -> tuple[Round, ...]:
    """The rounds that there can be at one stage; an empty one where it may be passed over."""
    return tuple(stage.options.values()) if isinstance(stage, Fork) else (stage,)


def turns_at(stage: Stage) -> tuple[Turn, ...]:
    """All turns that there can be at one stage."""
    return tuple(turn for turns in rounds_at(stage) for turn in turns)
