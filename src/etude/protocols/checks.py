"""What a protocol must be like, checked when it is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from etude.config.nearest import alternatives
from etude.protocols.rules import Bounds, Rules, voters_of, wrong
from etude.protocols.survey import Survey
from etude.protocols.turn import STANCES, Fork, Round, Schedule, Stage, Turn, rounds_at, turns_at

_TOLERANCE = 1e-9


def check_rules(rules: Rules) -> None:
    """Raises RequestError with the first thing that is wrong with who speaks, hears and decides."""
    _check_names(rules)
    for schedule in rules.schedules:
        for number, stage in enumerate(schedule):
            for where, turns in _rounds(number, stage):
                _check_round(rules, where, turns)
        _check_end(rules, schedule)


def check_bounds(rules: Rules, surveyed: Survey) -> Bounds:
    """The least and the most that each agent can earn: as given, or else as worked out.

    Raises RequestError for bounds that are not those of all agents, that can be left in a play, or that
    are missing where they cannot be worked out.
    """
    if not rules.bounds:
        if surveyed.earned is None:
            raise wrong(
                rules,
                "the payoff looks at what is said (`outcome.log`), so that its bounds cannot be worked out; "
                "give `bounds`: for each agent the least and the most that it can earn in a play",
            )
        return surveyed.earned
    missing = [agent for agent in rules.agents if agent not in rules.bounds]
    if missing:
        raise wrong(rules, f"'{missing[0]}' has no bounds; give them for all agents or for none")
    for agent, (low, high) in rules.bounds.items():
        _require(rules, agent, rules.agents, "bounds are for")
        if not low <= high:
            raise wrong(rules, f"the bounds of '{agent}' are {low:g} to {high:g}; the least comes first")
        least, most = (low, high) if surveyed.earned is None else surveyed.earned[agent]
        if not within(least, (low, high)) or not within(most, (low, high)):
            raise wrong(
                rules,
                f"'{agent}' can earn {least:g} to {most:g} in a play, outside its bounds {low:g} to {high:g}",
            )
    return rules.bounds


def within(value: float, bounds: tuple[float, float]) -> bool:
    """Whether something earned lies within bounds, but for rounding."""
    low, high = bounds
    return low - _TOLERANCE <= value <= high + _TOLERANCE


def _check_names(rules: Rules) -> None:
    if not rules.agents:
        raise wrong(rules, "it has no agents")
    for agent, role in rules.agents.items():
        if role.stance is not None and role.stance not in STANCES:
            known = ", ".join(map(str, STANCES))
            raise wrong(rules, f"the stance of '{agent}' is {role.stance!r}; it is one of: {known}, or None")
    for channel, readers in rules.channels.items():
        for reader in sorted(readers):
            _require(rules, reader, rules.agents, f"channel '{channel}' is read by")
    if not rules.schedules or not all(rules.schedules):
        raise wrong(rules, "it has no rounds")
    if rules.forced not in (None, "accept", "reject", "truth"):
        raise wrong(rules, f"a forced decision is accept, reject or truth, not {rules.forced!r}")


def _rounds(number: int, stage: Stage) -> Iterator[tuple[str, Round]]:
    """The rounds that there can be at a stage, each with its name; options that pass are left out."""
    if not isinstance(stage, Fork):
        yield f"round {number}", stage
        return
    named = [(f"option '{name}' of round {number}", turns) for name, turns in stage.options.items()]
    passing = all(not turns for _, turns in named)
    yield from ((where, turns) for where, turns in named if turns)
    if passing:
        yield f"round {number}", ()


def _check_round(rules: Rules, where: str, turns: Round) -> None:
    if not turns:
        raise wrong(rules, f"{where} has no turns")
    twice = _repeated([turn.agent for turn in turns])
    if twice:
        raise wrong(rules, f"'{twice}' has two turns in {where}")
    for turn in turns:
        _check_turn(rules, where, turn)
    channel = _repeated([channel for turn in turns for channel in turn.writes])
    if channel:
        writers = " and ".join(f"'{turn.agent}'" for turn in turns if channel in turn.writes)
        raise wrong(rules, f"{writers} both write on channel '{channel}' in {where}")
    deciders = [turn.agent for turn in turns if rules.agents[turn.agent].may_decide]
    if len(deciders) > 1 and rules.vote is None:
        raise wrong(
            rules,
            f"{' and '.join(deciders)} may both decide in {where}; say with `vote` what their ballots "
            f"come to, "
            "such as `vote=majority`",
        )


def _check_turn(rules: Rules, where: str, turn: Turn) -> None:
    _require(rules, turn.agent, rules.agents, f"{where} is a turn of")
    for channel in turn.writes:
        _require(rules, channel, rules.channels, f"'{turn.agent}' writes in {where} on")
        if turn.agent not in rules.channels[channel]:
            raise wrong(rules, f"'{turn.agent}' writes on channel '{channel}' in {where}, and cannot read it")
    if _repeated(turn.writes):
        raise wrong(rules, f"'{turn.agent}' writes twice on channel '{_repeated(turn.writes)}' in {where}")
    if turn.headers and len(turn.headers) != len(turn.writes):
        raise wrong(
            rules,
            f"'{turn.agent}' has {len(turn.headers)} headers in {where} for {len(turn.writes)} channels",
        )
    if turn.decide != "no" and not rules.agents[turn.agent].may_decide:
        raise wrong(rules, f"'{turn.agent}' {turn.decide} decide in {where}, and its role may not")
    if turn.decide == "no" and not turn.writes:
        raise wrong(rules, f"'{turn.agent}' neither writes nor decides in {where}")
    if turn.open and (turn.decide == "no" or not turn.writes):
        raise wrong(
            rules,
            f"'{turn.agent}' has an open ballot in {where}, which takes a decision and a channel to "
            "tell it on",
        )


def _check_end(rules: Rules, schedule: Schedule) -> None:
    """Without a vote nothing follows a round that must decide; where a verdict is needed, it is the last."""
    last = len(schedule) - 1
    obliged = [number for number, stage in enumerate(schedule) if _must_decide(stage)]
    votes = rules.vote is not None and len(voters_of(rules, schedule)) > 1
    if obliged and obliged[0] != last and not votes:
        raise wrong(rules, f"nothing can follow round {obliged[0]}, which must decide")
    if rules.needs_verdict and last not in obliged:
        speakers = " and ".join(dict.fromkeys(f"'{turn.agent}'" for turn in turns_at(schedule[last])))
        raise wrong(
            rules,
            f"the last round ({last}) is a turn of {speakers} that need not decide; end with a turn that "
            "must decide, or say `needs_verdict=False`",
        )


def _must_decide(stage: Stage) -> bool:
    """Whether, whatever is chosen, somebody must decide."""
    return all(any(turn.decide == "must" for turn in turns) for turns in rounds_at(stage))


def _require(rules: Rules, name: str, known: Collection[str], where: str) -> None:
    if name not in known:
        raise wrong(rules, f"{where} '{name}', which is not there" + alternatives(name, known))


def _repeated(names: Collection[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
