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
from etude.protocols.turn import Fork, Round, Schedule, Stage


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
    answers = log.utterances[-len(turns) :]
    ballots = {said.agent: said.decision for said in log.utterances if said.decision is not None}
    invalid = frozenset(answer.agent for answer in answers if answer.malformed)
    decision = _verdict(rules, facts, answers, ballots)
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


def chosen(stage: Stage, log: PlayLog) -> Round:
    """The turns at one stage, after what was said.

    Raises RequestError when a fork chooses what is not among its options.
    """
    if not isinstance(stage, Fork):
        return stage
    name = stage.choose(log)
    if not isinstance(name, str) or name not in stage.options:
        raise RequestError(
            f"a fork chose {name!r:.60}, which is not there" + alternatives(str(name), stage.options)
        )
    return stage.options[name]


def next_round(schedule: Schedule, number: int, log: PlayLog) -> tuple[int, Round] | None:
    """The first round from `number` on in which somebody has a turn; None when the play is over.

    Raises RequestError as `chosen`.
    """
    for later in range(number, len(schedule)):
        try:
            turns = chosen(schedule[later], log)
        except RequestError as error:
            raise RequestError(f"in round {later}, {error}") from None
        if turns:
            return later, turns
    return None


def _verdict(
    rules: Rules, facts: Facts, answers: Sequence[Utterance], ballots: dict[str, float]
) -> float | None:
    cast = [answer.decision for answer in answers if answer.decision is not None]
    if not cast or rules.vote is None:
        return cast[0] if cast else None
    verdict = rules.vote({voter: ballots.get(voter) for voter in facts.voters})
    if verdict is None:
        return None
    if isinstance(verdict, bool) or not isinstance(verdict, int | float) or not -1 <= verdict <= 1:
        raise RequestError(f"the vote came to {verdict!r:.60}; a verdict is a number from -1 to 1, or None")
    return float(verdict)


def _forced(rules: Rules, truth: Verdict) -> Verdict:
    if rules.forced == "truth":
        return truth
    return ACCEPT if rules.forced == "accept" else REJECT
