"""The log of everything that was said in a play, and the outcome of a round of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from etude.protocols.decision import Verdict


@dataclass(frozen=True, slots=True)
class Utterance:
    """One answer, as it counts in the play."""

    round: int
    """From 0."""
    agent: str
    text: str = ""
    """The answer as the model wrote it."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """Its messages, by channel; empty for a secret decision and for a malformed answer."""
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
        return tuple(utterance for utterance in self.utterances if utterance.agent == agent)

    def on(self, channel: str) -> tuple[str, ...]:
        """The messages on a channel."""
        return tuple(
            utterance.messages[channel] for utterance in self.utterances if channel in utterance.messages
        )

    def last(self, agent: str) -> Utterance | None:
        """The last answer of an agent; None before its first."""
        own = self.of(agent)
        return own[-1] if own else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a round: all that payoffs may depend on."""

    truth: Verdict
    """The right verdict."""
    stance: Verdict
    """The verdict that the example has its provers argue for, where a role leaves it to the example."""
    over: bool
    """Whether the play ended with this round."""
    decider: str | None = None
    """Of the round's agents the one whose role may decide, whether or not it did; of several the first."""
    decision: float | None = None
    """The verdict, in [-1, 1], from reject to accept; None when there was none. With a vote, that of the
    ballots."""
    invalid: frozenset[str] = frozenset()
    """Agents whose answer stayed malformed."""
    ballots: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The latest decision of each agent that has decided in the play, as it gave it."""
    sides: Mapping[str, Verdict] = field(default_factory=dict, hash=False)
    """The verdict that each agent argues for in this play; those that argue for nothing are left out."""
    log: PlayLog = field(default_factory=PlayLog, hash=False)
    """Everything that was said so far, this round included. A payoff that looks at it needs a protocol
    with `bounds`: they cannot be worked out."""


Payoff: TypeAlias = Callable[[Outcome], Mapping[str, float]]
"""The rewards of a round by agent; agents that are left out earn nothing. A pure function."""
