"""Votes: several agents decide, and what their ballots come to."""

from __future__ import annotations

import pytest

from etude.core.errors import RequestError
from etude.protocols import AtLeast, Protocol, Role, Turn, mean_vote
from etude.store.journal import Journal
from tests.protocols.courts import JURORS, deliberation, jury, roll_call
from tests.protocols.games import agent_of, example, play_record, play_tree, scripted, shape

A, R, NO = "Decision: accept", "Decision: reject", "hm"


@pytest.mark.parametrize(
    ("votes", "ballots", "verdict"),
    [
        (2, (1.0, 1.0, -1.0, None), 1.0),
        (2, (1.0, 1.0, -1.0, -1.0), None),
        (1, (None, -0.5, None, None), -1.0),
        (3, (1.0, 1.0, None, None), None),
    ],
)
def test_a_number_of_votes(votes: int, ballots: tuple[float | None, ...], verdict: float | None) -> None:
    assert AtLeast(votes)(dict(zip("abcd", ballots, strict=True))) == verdict


def test_a_mean_waits_for_all_ballots() -> None:
    assert mean_vote({"a": 1.0, "b": -0.5}) == 0.25
    assert mean_vote({"a": 1.0, "b": None}) is None


# By hand: 1 or -1 for the own ballot, 0 for none, and 2 or -2 for the verdict; the claim is true.
PAID = {
    # ballots of ann, bob, cid: earned under majority, under unanimity
    (A, A, A): ((3, 3, 3), (3, 3, 3)),
    (A, A, R): ((3, 3, 1), (1, 1, -1)),
    (A, R, R): ((-1, -3, -3), (1, -1, -1)),
    (R, R, R): ((-3, -3, -3), (-3, -3, -3)),
    (A, A, NO): ((3, 3, 2), (1, 1, 0)),
    (A, R, NO): ((1, -1, 0), (1, -1, 0)),
    (NO, R, NO): ((0, -1, 0), (0, -1, 0)),
    (NO, NO, NO): ((0, 0, 0), (0, 0, 0)),
}


@pytest.mark.parametrize("truth", [1, 0])
@pytest.mark.parametrize("ballots", PAID)
async def test_what_a_jury_earns(journal: Journal, ballots: tuple[str, ...], truth: int) -> None:
    for place, vote in enumerate(("majority", "unanimity")):
        engine = scripted(**{juror: [said] for juror, said in zip(JURORS, ballots, strict=True)})
        about = example(truth)
        tree = await play_tree(jury(vote), engine, journal, about=about, retries=0, id=f"train/{vote}/e/0")
        earned = tuple(tree.value(None, juror) for juror in JURORS)
        by_hand = PAID[ballots][place]
        assert earned == (by_hand if truth else tuple(-value for value in by_hand))
        [leaf] = tree.leaves()
        assert leaf.ending == ("undecided" if leaf.verdict is None else "decided")


async def test_ballots_of_one_round_are_secret_and_the_next_vote_is_another(journal: Journal) -> None:
    engine = scripted(ann=[A, A], bob=[A, A], cid=[R, A])
    tree = await play_tree(jury("unanimity", 3), engine, journal)
    assert [(node.round, node.decision) for node in tree.nodes] == [
        (0, 1.0), (0, 1.0), (0, -1.0), (1, 1.0), (1, 1.0), (1, 1.0),
    ]  # fmt: skip
    second = [request.messages[-1]["content"] for request in engine.requests[3:]]
    assert second == ["Go on."] * 3


async def test_open_ballots_are_heard_and_a_majority_ends_the_roll(journal: Journal) -> None:
    engine = scripted(ann=[f"I am sure. \n{A}"], bob=[A], cid=[R])
    tree = await play_tree(roll_call(), engine, journal)
    assert [agent for _, agent, _ in shape(tree)] == ["ann", "bob"]
    heard = {agent_of(request): request.messages[-1]["content"] for request in engine.requests}
    # What was said beside it is heard by nobody.
    assert heard == {"ann": "Decide now.", "bob": "ann: Decision: accept\n\nDecide now."}
    assert dict(tree.nodes[0].messages) == {"room": A}


async def test_a_ballot_stands_while_its_juror_goes_on_talking(journal: Journal) -> None:
    engine = scripted(ann=[A, "believe me"], bob=["why?", A], cid=["who knows", A])
    tree = await play_tree(deliberation(), engine, journal)
    [leaf] = tree.leaves()
    assert (leaf.round, leaf.verdict) == (1, 1.0)
    last_of_bob = [request for request in engine.requests if agent_of(request) == "bob"][-1]
    # A secret ballot is no unusable answer: nothing is heard of it.
    assert last_of_bob.messages[-1]["content"] == "cid: who knows"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vote": None}, "ann and bob and cid may both decide in round 0; give the `vote`"),
        (
            {"schedules": (((Turn("ann", decide="must", open=True),),),)},
            "'ann' has an open ballot in round 0, which takes a decision and a channel",
        ),
    ],
)
def test_votes_that_cannot_be_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        jury(**fields)


@pytest.mark.parametrize(
    ("vote", "told"),
    [
        (lambda ballots: 3.0, "in round 0, the vote came to 3.0"),
        (lambda ballots: float("nan"), "the vote came to nan"),
        (lambda ballots: ballots["eve"], "KeyError: 'eve'"),
    ],
)
async def test_what_is_no_verdict_fails_the_episode(journal: Journal, vote, told: str) -> None:
    record = await play_record(jury(vote), scripted(ann=[A], bob=[A], cid=[R]), journal)
    assert record.failure is not None and told in record.failure.reason


def test_a_protocol_may_do_without_a_verdict() -> None:
    talk = ((Turn("ann", ("hall",)),), (Turn("bob", ("hall",)),))
    fields = {
        "name": "talk",
        "agents": {"ann": Role("speaker"), "bob": Role("speaker")},
        "channels": {"hall": frozenset({"ann", "bob"})},
        "schedules": (talk,),
        "payoff": lambda outcome: {"ann": 1.0} if outcome.over and not outcome.invalid else {},
    }
    with pytest.raises(RequestError, match=r"last round \(1\) .* or say `needs_verdict=False`"):
        Protocol(**fields)  # type: ignore[arg-type]
    Protocol(**fields, needs_verdict=False)  # type: ignore[arg-type]
