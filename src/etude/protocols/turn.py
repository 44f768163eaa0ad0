"""A turn: an agent's chance to speak or to decide, and the role that it speaks in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from etude.protocols.decision import ACCEPT_REJECT, Scale

Decides: TypeAlias = Literal["no", "may", "must"]
Stance: TypeAlias = Literal[0, 1, "example"]
"""The verdict that an agent argues for; `example` leaves it to each example."""


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

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The channels with their headers; by default a header is the channel's name and a colon."""
        headers = self.headers or tuple(f"{channel}:" for channel in self.writes)
        return tuple(zip(self.writes, headers, strict=True))


Round: TypeAlias = tuple[Turn, ...]
"""Turns that are taken at the same time: none of them sees another."""
