"""A protocol as data: who speaks when, who hears it, who decides, and what it is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.rules import (
    STANCES,
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


@dataclass(frozen=True)
class Protocol(Rules):
    """A multi-agent exchange as data. It cannot be built wrong.

    Raises RequestError for two writers on a channel in one round, a writer that cannot read its channel,
    a deciding turn of an agent that may not decide, several deciders without a vote, a schedule that does
    not end in a must-decide turn where a verdict is needed, and names that are not there.
    """

    def __post_init__(self) -> None:
        """Check everything."""
        super().__post_init__()
        for fault in _faults(self):
            raise RequestError(f"protocol '{self.name}': {fault}")


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
    yield from _unknown(rules.bounds, rules.agents, "bounds are for")
    for agent in rules.agents if rules.bounds else ():
        if agent not in rules.bounds:
            yield f"'{agent}' has no bounds; give them for all agents or for none"
        elif not rules.bounds[agent][0] <= rules.bounds[agent][1]:
            yield f"the bounds of '{agent}' are {rules.bounds[agent]}; the least comes first"
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
