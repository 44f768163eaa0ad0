"""Widths: how many answers are sampled for each turn."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.rules import Rules
from etude.protocols.turn import rounds_at, turns_at

Width: TypeAlias = int | Sequence[int]
"""Answers for each turn; a list gives them by round, and its last number holds for the rounds after it."""

_wanted: ContextVar[Widths | None] = ContextVar("etude_widths", default=None)


@dataclass(frozen=True, slots=True)
class Widths:
    """How many answers are sampled where. 1 everywhere is a rollout, k everywhere branches at each
    answer, and `[k, 1]` in the first round only. Agents of one round branch one at a time: the k answers
    of each are crossed with those of the others, which makes k * k ways to go on for two of them."""

    default: tuple[int, ...] = (1,)
    """By round, for agents that are not in `by_agent`."""
    by_agent: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, widths: Widths | Width | Mapping[str, Width]) -> Widths:
        """Widths for all agents, or by agent, with 1 for those that are left out.

        Raises RequestError for a width that is no whole number of at least 1.
        """
        if isinstance(widths, Widths):
            return widths
        if isinstance(widths, Mapping):
            return cls(by_agent=tuple((agent, _by_round(width)) for agent, width in widths.items()))
        return cls(default=_by_round(widths))

    def at(self, agent: str, number: int) -> int:
        """Answers of an agent in round `number`, from 0."""
        by_round = dict(self.by_agent).get(agent, self.default)
        return by_round[min(number, len(by_round) - 1)]

    def check_agents(self, agents: Collection[str]) -> None:
        """Raises RequestError for an agent that is not there."""
        for agent, _ in self.by_agent:
            if agent not in agents:
                raise RequestError(f"widths: there is no agent '{agent}'" + alternatives(agent, agents))


def most_calls(protocol: Rules, widths: Widths, retries: int = 0) -> int:
    """The most model calls that a play can take, when nobody decides early.

    Where a round is chosen by what was said, no choice makes more.
    """
    most = 0
    for schedule in protocol.schedules:
        calls, plays = 0, 1
        for number, stage in enumerate(schedule):
            options = [[widths.at(turn.agent, number) for turn in turns] for turns in rounds_at(stage)]
            calls += plays * max(map(sum, options)) * (1 + retries)
            plays *= max(map(math.prod, options))
        most = max(most, calls)
    return most


def branches(protocol: Rules, widths: Widths, agents: Collection[str]) -> bool:
    """Whether one of the agents can have a turn that is answered more than once."""
    return any(
        turn.agent in agents and widths.at(turn.agent, number) > 1
        for schedule in protocol.schedules
        for number, stage in enumerate(schedule)
        for turn in turns_at(stage)
    )


@contextmanager
def branching(widths: Widths | Width | Mapping[str, Width]) -> Iterator[None]:
    """Plays that are started inside have these widths, whatever their workflow says.

    For algorithms that need more answers than a rollout has while they collect, and only then.
    """
    token = _wanted.set(Widths.of(widths))
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted_widths() -> Widths | None:
    """The widths of the innermost `branching`, or None outside of any."""
    return _wanted.get()


def _by_round(width: Width) -> tuple[int, ...]:
    widths = tuple(width) if isinstance(width, Sequence) else (width,)
    if not widths or not all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in widths
    ):
        raise RequestError(
            f"a width must be a whole number of at least 1, or a list of them, found {width!r}"
        )
    return widths
