"""Surveying a protocol before it is played: everything that can happen in it, as far as it can be tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.combinations import LIMIT, Slot, combinations_of, count_of
from etude.protocols.decision import ACCEPT, VERDICTS
from etude.protocols.extremes import Extremes, joined_with
from etude.protocols.made_up import answers_to, has_words, past_of
from etude.protocols.outcome import Outcome
from etude.protocols.resolving import Facts, chosen, next_round, resolve
from etude.protocols.rules import Bounds, Rules, voters_of, wrong
from etude.protocols.said import PlayLog, Utterance
from etude.protocols.turn import Fork, Round, Schedule, rounds_at

_LOOKS = "the payoff looks at what is said: what it pays is seen in play only, and held to the bounds there"


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found."""

    earned: Bounds | None
    """The least and the most that each agent can earn; None when that depends on what is said."""
    untried: tuple[str, ...]
    """What could not be tried before a play, in sentences for a person."""


def survey(rules: Rules) -> Survey:
    """Try the payoff, the vote and the choices of forks on everything that can happen.

    Raises RequestError for payoffs to unknown agents or that are no finite numbers, for what raises, and
    for a fork that chooses what is not there.
    """
    return _Surveyor(rules).survey()


class _Watched(PlayLog):
    """A log that knows whether it was looked at."""

    looked_at = False

    @property
    def utterances(self) -> tuple[Utterance, ...]:
        object.__setattr__(self, "looked_at", True)
        hidden: tuple[Utterance, ...] = vars(self)["_hidden"]
        return hidden

    @classmethod
    def of_log(cls, log: PlayLog) -> _Watched:
        made = cls.__new__(cls)
        object.__setattr__(made, "_hidden", log.utterances)
        return made


class _Surveyor:
    """One survey."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.looks = False
        self.notes: dict[str, None] = {}
        self._known: dict[tuple[object, ...], tuple[Extremes | None, Extremes | None]] = {}

    def survey(self) -> Survey:
        rules = self.rules
        earned: Extremes | None = None
        drawn_sides = VERDICTS if rules.draws_sides else (ACCEPT,)
        for schedule in rules.schedules:
            self._try_forks(schedule)
            voters = voters_of(rules, schedule)
            for truth, stance, drawn in product(VERDICTS, VERDICTS, drawn_sides):
                earned = _joined(earned, self._of_play(schedule, Facts(truth, stance, drawn, voters)))
        if self.looks:
            self.notes[_LOOKS] = None
        bounds = None if self.looks or earned is None else earned.bounds()
        return Survey(bounds, tuple(self.notes))

    def _of_play(self, schedule: Schedule, facts: Facts) -> Extremes | None:
        """What can be earned in a whole play."""
        ended: Extremes | None = None
        so_far: Extremes | None = Extremes.nothing(self.rules.agents)
        for number, stage in enumerate(schedule):
            going_on: Extremes | None = None
            for turns in rounds_at(stage):
                if not turns:
                    going_on = _joined(going_on, so_far)
                    continue
                for last in _may_be_last(schedule, number):
                    over, on = self._of_round(schedule, number, turns, facts, last=last)
                    ended = _joined(ended, _sum(so_far, over))
                    going_on = _joined(going_on, _sum(so_far, on))
            so_far = going_on
            if so_far is None:
                break
        return ended

    def _of_round(
        self, schedule: Schedule, number: int, turns: Round, facts: Facts, *, last: bool
    ) -> tuple[Extremes | None, Extremes | None]:
        """What can be earned with a round that ends the play, and with one that does not."""
        # Without a vote nobody has decided before, and what was said before does not matter.
        key = (turns, facts, last, None if self.rules.vote is None else (id(schedule), number))
        if key not in self._known:
            over: Extremes | None = None
            on: Extremes | None = None
            for log in self._logs(schedule, number, turns):
                outcome = self._resolved(facts, turns, log, last=last)
                earned = self._paid(outcome)
                if earned is None:
                    continue
                if outcome.over:
                    over = joined_with(over, earned, self.rules.agents)
                else:
                    on = joined_with(on, earned, self.rules.agents)
            self._known[key] = over, on
        return self._known[key]

    def _logs(self, schedule: Schedule, number: int, turns: Round) -> Iterator[PlayLog]:
        """The log after a round, for every combination of answers; what was said before it is made up."""
        now: list[Slot] = [answers_to(turn, number) for turn in turns]
        slots = [*past_of(self.rules, schedule, number), *now]
        total, tried = count_of(slots), 0
        for utterances in combinations_of(slots):
            tried += 1
            yield PlayLog(utterances)
        if total > LIMIT:
            self.notes[
                f"round {number} has {total:.3g} combinations of answers: payoffs and bounds were tried on "
                f"{tried} of them"
            ] = None
        if self.looks:
            silent = past_of(self.rules, schedule, number, silent=True)
            yield from map(PlayLog, combinations_of([*silent, *now]))

    def _resolved(self, facts: Facts, turns: Round, log: PlayLog, *, last: bool) -> Outcome:
        try:
            return resolve(self.rules, facts, turns, log, last=last)
        except RequestError as error:
            raise wrong(self.rules, str(error)) from None
        except Exception as error:
            raise wrong(self.rules, f"the vote raised {type(error).__name__}: {error}") from error

    def _paid(self, outcome: Outcome) -> Mapping[str, float] | None:
        """What agents earn; None when it depends on words that nobody has said yet."""
        log = _Watched.of_log(outcome.log)
        try:
            earned = self.rules.payoff(replace(outcome, log=log))
        except Exception as error:
            self.looks = self.looks or log.looked_at
            if log.looked_at and has_words(outcome.log):
                self.notes[f"on made-up words the payoff raised {type(error).__name__}: {error}"] = None
                return None
            raise wrong(
                self.rules, f"the payoff raised {type(error).__name__}: {error} for {shown(outcome)}"
            ) from error
        self.looks = self.looks or log.looked_at
        try:
            check_earned(self.rules, outcome, earned)
        except RequestError as error:
            raise wrong(self.rules, str(error)) from None
        return earned

    def _try_forks(self, schedule: Schedule) -> None:
        """Have every fork choose: on the empty log, on made-up words, and on a log of unusable answers."""
        for number, stage in enumerate(schedule):
            if not isinstance(stage, Fork):
                continue
            where = f"round {number}"
            self.notes[f"what is said chooses the turns of {where}; each of its options was tried"] = None
            for silent in (False, True):
                past = past_of(self.rules, schedule, number, silent=silent)
                log = PlayLog(tuple(slot[0] for slot in past))
                try:
                    chosen(stage, log)
                except Exception as error:
                    what = f"{where}: {_reason(error)}"
                    if not has_words(log):
                        raise wrong(self.rules, f"{what} {_after(log)}") from error
                    self.notes[f"{what}, on made-up words"] = None
        try:
            first = next_round(schedule, 0, PlayLog())
        except Exception as error:
            raise wrong(self.rules, f"{_reason(error)} before anything was said") from error
        if first is None:
            raise wrong(self.rules, "nobody has a turn: its forks pass over all rounds at the start")


def check_earned(rules: Rules, outcome: Outcome, earned: object) -> None:
    """Raises RequestError unless it is a mapping from agents of the protocol to finite numbers."""
    if not isinstance(earned, Mapping):
        raise RequestError(f"the payoff must be a mapping from agents to numbers, found {earned!r:.60}")
    for agent, value in earned.items():
        if agent not in rules.agents:
            what = f"payoffs are for '{agent}', which is not there"
            raise RequestError(what + alternatives(str(agent), rules.agents))
        try:
            is_finite = math.isfinite(value)
        except (TypeError, OverflowError):
            is_finite = False
        if not is_finite:
            raise RequestError(f"the payoff of '{agent}' is {value!r:.60} for {shown(outcome)}")


def shown(outcome: Outcome) -> str:
    """An outcome for a person: what is not as in most outcomes."""
    facts = {
        "truth": outcome.truth,
        "stance": outcome.stance,
        "over": outcome.over,
        "decision": outcome.decision,
        "invalid": sorted(outcome.invalid),
    }
    return f"Outcome({', '.join(f'{name}={value!r}' for name, value in facts.items())})"


def _may_be_last(schedule: Schedule, number: int) -> Sequence[bool]:
    """Whether the play may be over, and may go on, after a round in which nobody decided."""
    later = schedule[number + 1 :]
    may_end = all(any(not turns for turns in rounds_at(stage)) for stage in later)
    return ([True] if may_end else []) + ([False] if later else [])


def _joined(first: Extremes | None, other: Extremes | None) -> Extremes | None:
    if first is None or other is None:
        return first or other
    return first.joined(other)


def _sum(first: Extremes | None, other: Extremes | None) -> Extremes | None:
    return None if first is None or other is None else first.plus(other)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RequestError) else f"a fork raised {type(error).__name__}: {error}"


def _after(log: PlayLog) -> str:
    return "when no answer before it was usable" if len(log) else "before anything was said"
