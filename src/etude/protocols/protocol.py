"""A protocol as data: who speaks when, who hears it, who decides, and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

from etude.protocols.checks import check_bounds, check_rules
from etude.protocols.rules import Rules
from etude.protocols.survey import survey


@dataclass(frozen=True)
class Protocol(Rules):
    """A multi-agent exchange as data. It cannot be built wrong.

    Raises RequestError for two writers on a channel in one round, a writer that cannot read its channel,
    a deciding turn of an agent that may not decide, several deciders without a vote, a schedule that does
    not end in a must-decide turn where a verdict is needed, payoffs outside the bounds or without bounds
    where they look at what was said, a payoff, vote or fork that raises, and names that are not there.
    """

    has_given_bounds: bool = field(init=False, default=False)
    """Whether the bounds were given and not worked out."""
    untried: tuple[str, ...] = field(init=False, default=())
    """What could not be tried before a play, in sentences for a person; empty when everything was."""

    def __post_init__(self) -> None:
        """Check everything, and work the bounds out."""
        super().__post_init__()
        check_rules(self)
        surveyed = survey(self)
        object.__setattr__(self, "has_given_bounds", bool(self.bounds))
        object.__setattr__(self, "untried", surveyed.untried)
        object.__setattr__(self, "bounds", MappingProxyType(dict(check_bounds(self, surveyed))))
