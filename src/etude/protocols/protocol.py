"""A protocol as data: who speaks when, who hears it, who decides, and what it is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.rules import (
    STANCES,
    Bounds,
    Fork,
    Round,
    Rules,
    Schedule,
    Stage,
    Turn,
    rounds_at,
    turns_at,
    voters_of,
)
from etude.protocols.survey import Survey

_TOLERANCE = 1e-9


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

    def __post_init__(self) -> None:
        """Check everything, and work the bounds out."""
        super().__post_init__()
        try:
            for fault in _faults(self):
                raise RequestError(fault)
            bounds = _checked_bounds(self, Survey(self).earned)
        except RequestError as error:
            raise RequestError(f"protocol '{self.name}': {error}") from error
        object.__setattr__(self, "has_given_bounds", bool(self.bounds))
        object.__setattr__(self, "bounds", MappingProxyType(dict(bounds)))


def within(value: float, bounds: tuple[float, float]) -> bool:
    """Whether something earned lies within bounds, but for rounding."""
    low, high = bounds
    return low - _TOLERANCE <= value <= high + _TOLERANCE


def _checked_bounds(rules: Rules, earned: Bounds | None) -> Bounds:
    """The least and the most that each agent can earn: as given, or else as worked out."""
    if not rules.bounds:
        if earned is None:
            raise RequestError(
                "the payoff looks at what is said (`outcome.log`), so that its bounds cannot be worked out; "
                "give `bounds`: for each agent the least and the most that it can earn in a play"
            )
        return earned
    missing = [agent for agent in rules.agents if agent not in rules.bounds]
    if missing:
        raise RequestError(f"'{missing[0]}' has no bounds; give them for all agents or for none")
    for agent, (low, high) in rules.bounds.items():
        for fault in _unknown([agent], rules.agents, "bounds are for"):
            raise RequestError(fault)
        if not low <= high:
            raise RequestError(f"the bounds of '{agent}' are {low:g} to {high:g}; the least comes first")
        least, most = (low, high) if earned is None else earned[agent]
        if not within(least, (low, high)) or not within(most, (low, high)):
            raise RequestError(
                f"'{agent}' can earn {least:g} to {most:g} in a play, outside its bounds {low:g} to {high:g}"
            )
    return rules.bounds


def _faults(rules: Rules) -> Iterator[str]:
    """All that is wrong with who speaks, hears and decides. A check takes those before it for granted."""
    if not rules.agents:
        yield "it has no agents"
    for agent, role in rules.agents.items():
        if role.stance not in (None, *STANCES):
            known = ", ".join(map(str, STANCES))
            yield f"the stance of '{agent}' is {role.stance!r}; it is one of: {known}, or None"
    for channel, readers in rules.channels.items():
        yield from _unknown(sorted(readers), rules.agents, f"channel '{channel}' is read by")
    if not rules.schedules or not all(rules.schedules):
        yield "it has no rounds"
    if rules.forced not in (None, "accept", "reject", "truth"):
        yield f"a forced decision is accept, reject or truth, not {rules.forced!r}"
    for schedule in rules.schedules:
        for number, stage in enumerate(schedule):
            for where, turns in _rounds(number, stage):
                yield from _faults_of_round(rules, where, turns)
        yield from _faults_of_end(rules, schedule)


def _rounds(number: int, stage: Stage) -> Iterator[tuple[str, Round]]:
    """The possible rounds of a stage, each with its name; options that pass are left out."""
    if not isinstance(stage, Fork):
        yield f"round {number}", stage
    elif not any(stage.options.values()):
        yield f"round {number}", ()
    else:
        for name, turns in stage.options.items():
            if turns:
                yield f"option '{name}' of round {number}", turns


def _faults_of_round(rules: Rules, where: str, turns: Round) -> Iterator[str]:
    if not turns:
        yield f"{where} has no turns"
    for agent in _repeated(turn.agent for turn in turns):
        yield f"'{agent}' has two turns in {where}"
    for turn in turns:
        yield from _faults_of_turn(rules, where, turn)
    for channel in _repeated(channel for turn in turns for channel in turn.writes):
        writers = " and ".join(f"'{turn.agent}'" for turn in turns if channel in turn.writes)
        yield f"{writers} both write on channel '{channel}' in {where}"
    deciders = [turn.agent for turn in turns if rules.agents[turn.agent].may_decide]
    if len(deciders) > 1 and rules.vote is None:
        yield (
            f"{' and '.join(deciders)} may both decide in {where}; give the `vote` that makes one verdict of "
            "their ballots, such as `vote=majority`"
        )


def _faults_of_turn(rules: Rules, where: str, turn: Turn) -> Iterator[str]:
    agent, writes = turn.agent, turn.writes
    yield from _unknown([agent], rules.agents, f"{where} is a turn of")
    yield from _unknown(writes, rules.channels, f"'{agent}' writes in {where} on")
    for channel in writes:
        if agent not in rules.channels[channel]:
            yield f"'{agent}' writes on channel '{channel}' in {where}, and cannot read it"
    for channel in _repeated(writes):
        yield f"'{agent}' writes twice on channel '{channel}' in {where}"
    if turn.headers and len(turn.headers) != len(writes):
        yield f"'{agent}' has {len(turn.headers)} headers in {where} for {len(writes)} channels"
    if turn.decide != "no" and not rules.agents[agent].may_decide:
        yield f"'{agent}' {turn.decide} decide in {where}, and its role may not"
    if turn.decide == "no" and not writes:
        yield f"'{agent}' neither writes nor decides in {where}"
    if turn.open and (turn.decide == "no" or not writes):
        yield (
            f"'{agent}' has an open ballot in {where}, which takes a decision and a channel to announce it on"
        )


def _faults_of_end(rules: Rules, schedule: Schedule) -> Iterator[str]:
    """Without a vote nothing follows a round that must decide; where a verdict is needed, it is the last."""
    last = len(schedule) - 1
    obliged = [
        number
        for number, stage in enumerate(schedule)
        if all(any(turn.decide == "must" for turn in turns) for turns in rounds_at(stage))
    ]
    votes = rules.vote is not None and len(voters_of(rules, schedule)) > 1
    if obliged and obliged[0] != last and not votes:
        yield f"nothing can follow round {obliged[0]}, which must decide"
    if rules.needs_verdict and last not in obliged:
        speakers = " and ".join(dict.fromkeys(f"'{turn.agent}'" for turn in turns_at(schedule[last])))
        yield (
            f"the last round ({last}) is a turn of {speakers} that need not decide; end with a turn that "
            "must decide, or say `needs_verdict=False`"
        )


def _unknown(names: Iterable[str], known: Collection[str], where: str) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"{where} '{name}', which is not there" + alternatives(name, known)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
