"""Payoffs that look at what was said."""

from __future__ import annotations

import pytest

from etude.protocols import Outcome, Protocol, Role, Turn
from etude.store.journal import Journal
from tests.protocols.games import play_record, play_tree, scripted


def one_speaker(payoff, **fields) -> Protocol:
    return Protocol(
        name="speech",
        agents={"ann": Role("speaker")},
        channels={"hall": frozenset({"ann"})},
        schedules=(((Turn("ann", ("hall",)),),),),
        payoff=payoff,
        needs_verdict=False,
        bounds={"ann": (0.0, 1.0)},
        **fields,
    )


async def test_a_play_without_a_verdict_is_paid_by_what_was_said(journal: Journal) -> None:
    protocol = one_speaker(lambda outcome: {"ann": len(outcome.log[-1].text) / 10})
    tree = await play_tree(protocol, scripted(ann=["seven"]), journal)
    assert tree.value(None, "ann") == 0.5
    [leaf] = tree.leaves()
    assert (leaf.ending, leaf.verdict) == ("undecided", None)


async def test_a_play_that_earns_more_than_its_bounds_fails_and_says_so(journal: Journal) -> None:
    protocol = one_speaker(lambda outcome: {"ann": float(len(outcome.log[-1].messages["hall"]))})
    record = await play_record(protocol, scripted(ann=["seven"]), journal)
    assert record.failure is not None
    assert "'ann' earned 5 in this play, outside its bounds 0 to 1" in record.failure.reason


@pytest.mark.parametrize("earned", [{"ann": float("nan")}, {"ann": "much"}, {"eve": 1.0}, None, 3])
async def test_what_is_no_payoff_fails_the_episode(journal: Journal, earned) -> None:
    def pay(outcome: Outcome):
        return earned if outcome.log[-1].text == "go" else {}

    record = await play_record(one_speaker(pay), scripted(ann=["go"]), journal)
    assert record.failure is not None
    assert "protocol 'speech': in round 0, " in record.failure.reason
