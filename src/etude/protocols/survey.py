"""Surveying a protocol before it is played: trying its payoff, vote and forks on all that can happen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.decision import ACCEPT, VERDICTS
from etude.protocols.rules import (
    Bounds,
    Facts,
    Fork,
    Outcome,
    PlayLog,
    Round,
    Rules,
    Schedule,
    Turn,
    Utterance,
    chosen,
    next_round,
    resolve,
    rounds_at,
    voters_of,
)

LIMIT = 1024
"""More combinations than this are not all tried: their number doubles with every agent."""

Slot: TypeAlias = Sequence[Utterance]
"""The answers that one agent can give."""

_WORDS = "…"
"""Stands in a log for a message that nobody has written yet."""


def combinations_of(slots: Sequence[Slot]) -> Iterator[tuple[Utterance, ...]]:
    """One answer of each slot, in every combination or, beyond `LIMIT`, in a cover of them.

    The cover has those in which all answer alike, in which one of them does otherwise, and in which the
    first do one thing and the others another, so that every count of votes and of failures is there. Its
    size grows with the square of the number of agents at the most.
    """
    is_small = math.prod(map(len, slots)) <= LIMIT
    for indices in product(*(range(len(slot)) for slot in slots)) if is_small else _cover(slots):
        yield tuple(slot[index] for slot, index in zip(slots, indices, strict=True))


def _cover(slots: Sequence[Slot]) -> Iterable[tuple[int, ...]]:
    picks = [_picks(slot) for slot in slots]
    kinds = range(max(map(len, picks)))
    alike = [tuple(pick[min(kind, len(pick) - 1)] for pick in picks) for kind in kinds]
    exceptions = [
        (*base[:position], index, *base[position + 1 :])
        for base in alike
        for position, pick in enumerate(picks)
        for index in pick
    ]
    halves = [
        (*base[:position], *other[position:])
        for base, other in product(alike, alike)
        for position in range(1, len(slots))
    ]
    return dict.fromkeys([*alike, *exceptions, *halves])


def _picks(slot: Slot) -> list[int]:
    """The answers that stand for all of a slot: no decision, the extreme ones, and the least sure ones."""
    silent = [index for index, answer in enumerate(slot) if answer.decision is None]
    decided = sorted((a.decision, index) for index, a in enumerate(slot) if a.decision is not None)
    rejects = [index for decision, index in decided if decision < 0]
    accepts = [index for decision, index in decided if decision > 0]
    neither = [index for decision, index in decided if decision == 0]
    return list(dict.fromkeys([*silent, *rejects[:1], *rejects[-1:], *accepts[:1], *accepts[-1:], *neither]))


def check_earned(rules: Rules, outcome: Outcome, earned: object) -> None:
    """Raises RequestError unless it is a mapping from agents of the protocol to finite numbers."""
    if not isinstance(earned, Mapping):
        raise RequestError(f"the payoff must be a mapping from agents to numbers, found {earned!r:.60}")
    for agent, value in earned.items():
        if agent not in rules.agents:
            raise RequestError(
                f"payoffs are for '{agent}', which is not there" + alternatives(str(agent), rules.agents)
            )
        try:
            is_finite = math.isfinite(value)
        except (TypeError, OverflowError):
            is_finite = False
        if not is_finite:
            raise RequestError(f"the payoff of '{agent}' is {value!r:.60} for {_shown(outcome)}")


class _WatchedLog(PlayLog):
    """A log that knows whether its utterances were looked at."""

    looked_at = False

    def __getattribute__(self, name: str) -> Any:
        if name == "utterances":
            object.__setattr__(self, "looked_at", True)
        return super().__getattribute__(name)


class Survey:
    """Tries the payoff, the vote and the choices of forks on everything that can happen.

    It works out the bounds round by round, with made-up answers in place of the models'. Raises RequestError
    for payoffs to unknown agents or that are no finite numbers, for what raises, and for a fork that chooses
    what is not there.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._payoff_looks = False
        self._never: Bounds = dict.fromkeys(rules.agents, (math.inf, -math.inf))
        """The bounds of what cannot be: they change nothing beside others, whatever is added to them."""
        self._known: dict[tuple[object, ...], tuple[Bounds, Bounds]] = {}
        plays: list[Bounds] = []
        drawn_sides = VERDICTS if rules.draws_sides else (ACCEPT,)
        for schedule in rules.schedules:
            self._try_forks(schedule)
            voters = voters_of(rules, schedule)
            for truth, stance, drawn in product(VERDICTS, VERDICTS, drawn_sides):
                plays.append(self._of_play(schedule, Facts(truth, stance, drawn, voters)))
        self.earned: Bounds | None = None if self._payoff_looks else _either(*plays)
        """The least and the most that each agent can earn; None when that depends on what is said."""

    def _of_play(self, schedule: Schedule, facts: Facts) -> Bounds:
        """The bounds of a play's payoffs."""
        ended = self._never
        so_far: Bounds = dict.fromkeys(self._rules.agents, (0.0, 0.0))
        for number, stage in enumerate(schedule):
            going_on = self._never
            for turns in rounds_at(stage):
                if not turns:
                    going_on = _either(going_on, so_far)
                    continue
                for last in _may_be_last(schedule, number):
                    over, on = self._of_round(schedule, number, turns, facts, last=last)
                    ended = _either(ended, _sum(so_far, over))
                    going_on = _either(going_on, _sum(so_far, on))
            so_far = going_on
        return ended

    def _of_round(
        self, schedule: Schedule, number: int, turns: Round, facts: Facts, *, last: bool
    ) -> tuple[Bounds, Bounds]:
        """The bounds of a round that ends the play, and of one that does not."""
        # Without a vote nobody has decided before, and what was said before does not matter.
        key = (turns, facts, last, None if self._rules.vote is None else (schedule, number))
        if key not in self._known:
            over = on = self._never
            for log in self._logs(schedule, number, turns):
                with _raising("the vote"):
                    outcome = resolve(self._rules, facts, turns, log, last=last)
                earned = self._paid(outcome)
                if earned is None:
                    continue
                exact: Bounds = {agent: (float(earned.get(agent, 0.0)),) * 2 for agent in self._never}
                if outcome.over:
                    over = _either(over, exact)
                else:
                    on = _either(on, exact)
            self._known[key] = over, on
        return self._known[key]

    def _logs(self, schedule: Schedule, number: int, turns: Round) -> Iterator[PlayLog]:
        """The log after a round, for every combination of answers; what was said before it is made up."""
        now = [_answers_to(turn, number) for turn in turns]
        slots = [*_past_of(self._rules, schedule, number), *now]
        yield from map(PlayLog, combinations_of(slots))
        if self._payoff_looks:
            silent = _past_of(self._rules, schedule, number, silent=True)
            yield from map(PlayLog, combinations_of([*silent, *now]))

    def _paid(self, outcome: Outcome) -> Mapping[str, float] | None:
        """The rewards of agents; None when they depend on words that nobody has said yet."""
        log = _WatchedLog(outcome.log.utterances)
        try:
            earned = self._rules.payoff(replace(outcome, log=log))
        except Exception as error:
            failure = f"the payoff raised {type(error).__name__}: {error}"
            if not (log.looked_at and _has_words(outcome.log)):
                raise RequestError(f"{failure} for {_shown(outcome)}") from error
            earned = None
        else:
            check_earned(self._rules, outcome, earned)
        self._payoff_looks = self._payoff_looks or log.looked_at
        return earned

    def _try_forks(self, schedule: Schedule) -> None:
        """Have every fork choose: on the empty log, on made-up words, and on a log of unusable answers."""
        for number, stage in enumerate(schedule):
            if not isinstance(stage, Fork):
                continue
            for silent in (False, True):
                past = _past_of(self._rules, schedule, number, silent=silent)
                log = PlayLog(tuple(slot[0] for slot in past))
                try:
                    with _raising("a fork"):
                        chosen(stage, log)
                except RequestError as error:
                    if not _has_words(log):
                        when = "when no answer before it was usable" if log else "before anything was said"
                        raise RequestError(f"round {number}: {error} {when}") from error
        with _raising("a fork"):
            first = next_round(schedule, 0, PlayLog())
        if first is None:
            raise RequestError("nobody has a turn: its forks pass over all rounds at the start")


def _either(*options: Bounds) -> Bounds:
    """The bounds when any of the options may happen."""
    return {
        agent: (min(bounds[agent][0] for bounds in options), max(bounds[agent][1] for bounds in options))
        for agent in options[0]
    }


def _sum(first: Bounds, then: Bounds) -> Bounds:
    """The bounds when one happens after the other."""
    return {agent: (low + then[agent][0], high + then[agent][1]) for agent, (low, high) in first.items()}


def _may_be_last(schedule: Schedule, number: int) -> Sequence[bool]:
    """Whether the play may be over, and may go on, after a round in which nobody decided."""
    later = schedule[number + 1 :]
    may_end = all(any(not turns for turns in rounds_at(stage)) for stage in later)
    return ([True] if may_end else []) + ([False] if later else [])


def _answers_to(turn: Turn, number: int) -> list[Utterance]:
    """Every kind of answer that a turn in round `number` can bring: words, each decision, nothing usable."""
    words = Utterance(number, turn.agent, _WORDS, dict.fromkeys(turn.writes, _WORDS))
    values = () if turn.decide == "no" else turn.scale.values
    return [
        *([] if turn.decide == "must" else [words]),
        *(Utterance(number, turn.agent, "", turn.announced(value), value) for value in values),
        Utterance(number, turn.agent, malformed=True),
    ]


def _past_of(rules: Rules, schedule: Schedule, number: int, *, silent: bool = False) -> list[Slot]:
    """The answers before a round, one slot for each turn; the first answer of each is words.

    With a vote, the last turn of each voter has all of its decisions, and the others' have none: without
    one nobody has decided yet. When `silent`, nobody gave a usable answer, but for those who must. Where
    there were several rounds to choose from, it is the first that has turns.
    """
    turns = [
        (before, turn)
        for before, stage in enumerate(schedule[:number])
        for turn in next((turns for turns in rounds_at(stage) if turns), ())
    ]
    last = {turn.agent: index for index, (_, turn) in enumerate(turns) if turn.decide != "no"}
    slots: list[Slot] = []
    for index, (before, turn) in enumerate(turns):
        answers = _answers_to(turn, before)
        if silent and not rules.agents[turn.agent].must_be_valid:
            slots.append(answers[-1:])
        elif rules.vote is not None and last.get(turn.agent) == index:
            slots.append(answers)
        else:
            slots.append(answers[:1] if turn.decide != "must" else answers[-1:])
    return slots


def _has_words(log: PlayLog) -> bool:
    """Whether any message in a log was made up."""
    return any(utterance.text == _WORDS for utterance in log)


def _shown(outcome: Outcome) -> str:
    """An outcome for a person, without what is as in most outcomes."""
    return (
        f"Outcome(truth={outcome.truth}, stance={outcome.stance}, over={outcome.over}, "
        f"decision={outcome.decision}, invalid={sorted(outcome.invalid)})"
    )


@contextmanager
def _raising(function: str) -> Iterator[None]:
    """Say in a RequestError which of the user's functions raised."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"{function} raised {type(error).__name__}: {error}") from error
