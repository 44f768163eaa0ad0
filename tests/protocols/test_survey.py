"""A protocol is built in time that grows with a small power of its agents: counted, not timed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from math import prod

import pytest

from etude.protocols import SCALES, Outcome, Protocol, Role, Turn, majority
from etude.protocols.rules import Utterance
from etude.protocols.survey import LIMIT, combinations_of


class Counting:
    """A payoff that counts how often it is asked, and keeps who was invalid."""

    def __init__(self) -> None:
        self.calls = 0
        self.invalid: set[frozenset[str]] = set()

    def __call__(self, outcome: Outcome) -> Mapping[str, float]:
        self.calls += 1
        self.invalid.add(outcome.invalid)
        silent = dict.fromkeys(outcome.invalid, -1.0)
        return silent if outcome.decision is None else silent | {"judge": outcome.decision}


def speakers(count: int, payoff: Counting) -> Protocol:
    """`count` agents speak at once, each on a channel of its own, and a judge decides."""
    names = [f"a{number}" for number in range(count)]
    speak = tuple(Turn(name, (name,)) for name in names)
    return Protocol(
        name="crowd",
        agents={name: Role("speaker") for name in names} | {"judge": Role("verifier", may_decide=True)},
        channels={name: frozenset({name, "judge"}) for name in names},
        schedules=((speak, (Turn("judge", decide="must"),)),),
        payoff=payoff,
    )


def voters(count: int, payoff: Counting, scale: str = "accept_reject") -> Protocol:
    """`count` jurors vote at once."""
    names = [f"a{number}" for number in range(count)]
    ballot = tuple(Turn(name, decide="must", scale=SCALES[scale]) for name in names)
    return Protocol(
        name="jury",
        agents={name: Role("juror", may_decide=True) for name in names},
        channels={},
        schedules=((ballot,),),
        payoff=lambda outcome: {agent: value for agent, value in payoff(outcome).items() if agent != "judge"},
        vote=majority,
    )


@pytest.mark.parametrize("make", [speakers, voters])
def test_forty_agents_at_once_take_few_outcomes(make) -> None:
    counts = {}
    for count in (20, 40, 80):
        payoff = Counting()
        protocol = make(count, payoff)
        counts[count] = payoff.calls
        assert protocol.bounds["a0"] == (-1.0, 0.0)
    assert counts[40] < 4000
    # Twice the agents are at the most four times the outcomes: they were a million times as many.
    assert counts[80] <= 4 * counts[40] <= 16 * counts[20]


def test_many_graded_ballots_take_few_outcomes() -> None:
    payoff = Counting()
    voters(40, payoff, "out_of_100")
    assert payoff.calls < 20_000


def test_few_agents_are_tried_in_all_combinations() -> None:
    payoff = Counting()
    speakers(9, payoff)
    names = [f"a{number}" for number in range(9)]
    subsets = {frozenset(some) for size in range(10) for some in combinations(names, size)}
    assert subsets <= payoff.invalid


def slots(count: int, decisions: int = 0) -> list[list[Utterance]]:
    values = [2 * number / (decisions - 1) - 1 for number in range(decisions)]
    return [
        [
            Utterance(0, f"a{place}", "words"),
            *(Utterance(0, f"a{place}", decision=value) for value in values),
            Utterance(0, f"a{place}", malformed=True),
        ]
        for place in range(count)
    ]


@pytest.mark.parametrize(("count", "decisions"), [(1, 0), (4, 2), (10, 0), (2, 11)])
def test_few_combinations_are_all_there(count: int, decisions: int) -> None:
    given = slots(count, decisions)
    found = list(combinations_of(given))
    assert prod(map(len, given)) == len(found) <= LIMIT
    assert {tuple(map(id, one)) for one in found} == {tuple(map(id, one)) for one in product(*given)}


@pytest.mark.parametrize("decisions", [0, 2, 3, 11])
def test_a_cover_has_every_count_and_every_single_exception(decisions: int) -> None:
    given = slots(16, decisions)
    assert prod(map(len, given)) > LIMIT
    found = list(combinations_of(given))
    assert len(found) == len({tuple(map(id, one)) for one in found}) < 3000
    assert {sum(answer.malformed for answer in one) for one in found} == set(range(17))
    alone = {one[place].agent for one in found for place in range(16) if _is_alone(one, place)}
    assert len(alone) == 16
    if decisions:
        accepts = {sum((answer.decision or 0) > 0 for answer in one) for one in found}
        assert accepts == set(range(17))
        extremes = {answer.decision for one in found for answer in one}
        assert {-1.0, 1.0} <= extremes
        if decisions % 2:
            assert 0.0 in extremes


def _is_alone(answers: tuple[Utterance, ...], place: int) -> bool:
    """Whether an agent is malformed, and nobody else is."""
    return [number for number, answer in enumerate(answers) if answer.malformed] == [place]
