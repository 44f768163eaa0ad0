"""A protocol is built in time that grows with a small power of its agents: counted, not timed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from etude.protocols import SCALES, Outcome, Protocol, Role, Turn, majority


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
