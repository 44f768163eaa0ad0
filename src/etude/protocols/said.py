"""What was said in a play, whole: all that payoffs and the choice of a turn may look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Utterance:
    """One answer, as it counts in the play."""

    round: int
    """From 0."""
    agent: str
    text: str = ""
    """The answer as the model wrote it."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """What it says, by channel; empty for a secret decision and for a malformed answer."""
    decision: float | None = None
    """In [-1, 1], from reject to accept; None when it does not decide."""
    malformed: bool = False
    """Whether no attempt was usable."""


@dataclass(frozen=True)
class PlayLog:
    """Everything that was said on one way through a play, on all channels, oldest first.

    Agents of one round are in the order of their turns. Where a play branches, every branch has a log of
    its own.
    """

    utterances: tuple[Utterance, ...] = ()

    def __iter__(self) -> Iterator[Utterance]:
        return iter(self.utterances)

    def __len__(self) -> int:
        return len(self.utterances)

    def of(self, agent: str) -> tuple[Utterance, ...]:
        """The answers of an agent."""
        return tuple(said for said in self.utterances if said.agent == agent)

    def on(self, channel: str) -> tuple[str, ...]:
        """The messages on a channel."""
        return tuple(said.messages[channel] for said in self.utterances if channel in said.messages)

    def last(self, agent: str) -> Utterance | None:
        """The last answer of an agent; None before its first."""
        own = self.of(agent)
        return own[-1] if own else None
