"""Resolving a round: from what was said to what it came to, and to the round after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.decision import ACCEPT, REJECT, Verdict, sign
from etude.protocols.outcome import Outcome
from etude.protocols.rules import Rules
from etude.protocols.said import PlayLog, Utterance
from etude.protocols.turn import Fork, Round, Schedule


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for a whole play, whatever is said in it."""

    truth: Verdict
    """The right verdict."""
    stance: Verdict
    """The side that the example has."""
    drawn: Verdict
    """The side that was drawn for the play."""
    voters: tuple[str, ...]
    """The agents with a turn to decide in its schedule."""


def resolve(rules: Rules, facts: Facts, turns: Round, log: PlayLog, *, last: bool) -> Outcome:
    """What a round comes to when it has been played.

    `log` ends with the answers of the round, in the order of its turns; `last` is whether no round
    follows it. Raises RequestError when the vote gives no verdict in [-1, 1] and not None either.
    """
    said = log.utterances[-len(turns) :]
    ballots = {one.agent: one.decision for one in log.utterances if one.decision is not None}
    invalid = frozenset(one.agent for one in said if one.malformed)
    decision = _verdict(rules, facts, said, ballots)
    if rules.forced is not None and (decision is not None or last):
        decision = float(sign(_forced(rules, facts.truth)))
    cut_short = any(rules.agents[agent].must_be_valid for agent in invalid)
    return Outcome(
        truth=facts.truth,
        stance=facts.stance,
        over=last or decision is not None or cut_short,
        decider=next((turn.agent for turn in turns if rules.agents[turn.agent].may_decide), None),
        decision=decision,
        invalid=invalid,
        ballots=ballots,
        sides=rules.sides(facts.stance, facts.drawn),
        log=log,
    )


def chosen(place: Round | Fork, log: PlayLog) -> Round:
    """The turns in one place of a schedule, after what was said.

    Raises RequestError when a fork chooses what is not among its options.
    """
    if not isinstance(place, Fork):
        return place
    name = place.choose(log)
    if not isinstance(name, str) or name not in place.options:
        raise RequestError(
            f"a fork chose {name!r:.60}, which is not there" + alternatives(str(name), place.options)
        )
    return place.options[name]


def next_round(schedule: Schedule, number: int, log: PlayLog) -> tuple[int, Round] | None:
    """The first round from `number` on in which somebody has a turn; None when the play is over."""
    for later in range(number, len(schedule)):
        turns = chosen(schedule[later], log)
        if turns:
            return later, turns
    return None


def _verdict(
    rules: Rules, facts: Facts, said: Sequence[Utterance], ballots: dict[str, float]
) -> float | None:
    cast = [one.decision for one in said if one.decision is not None]
    if not cast or rules.vote is None:
        return cast[0] if cast else None
    found = rules.vote({voter: ballots.get(voter) for voter in facts.voters})
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not -1 <= found <= 1:
        raise RequestError(f"the vote came to {found!r:.60}; a verdict is a number from -1 to 1, or None")
    return float(found)


def _forced(rules: Rules, truth: Verdict) -> Verdict:
    if rules.forced == "truth":
        return truth
    return ACCEPT if rules.forced == "accept" else REJECT
