"""An outcome: what a round came to, which is all that payoffs may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from etude.protocols.decision import Verdict
from etude.protocols.said import PlayLog


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round came to: all that payoffs may depend on."""

    truth: Verdict
    """The right verdict."""
    stance: Verdict
    """The verdict that the example has its provers argue for, where a role leaves it to the example."""
    over: bool
    """Whether the play ended with this round."""
    decider: str | None = None
    """Of the round's agents the one whose role may decide, whether or not it did; of several the first."""
    decision: float | None = None
    """The verdict, in [-1, 1], from reject to accept; None when there was none. With a vote, what the
    ballots came to."""
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
"""What each agent earns with a round; agents that are left out earn nothing. A pure function."""
