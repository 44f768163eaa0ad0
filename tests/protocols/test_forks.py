"""Rounds that are chosen by what was said, and sides that are drawn for each play."""

from __future__ import annotations

import pytest

from etude.core.errors import RequestError
from etude.protocols import (
    Fork,
    Protocol,
    Role,
    Rollouts,
    Scenario,
    Turn,
    adp,
)
from etude.protocols.rules import drawn_side
from etude.store.journal import Journal
from tests.protocols.courts import hearing
from tests.protocols.games import agent_of, play_record, play_tree, scripted, shape
from tests.support import ScriptedEngine

A = "Decision: accept"


async def test_what_was_said_chooses_who_speaks_next(journal: Journal) -> None:
    engine = scripted(
        judge=["the expert, please", "and the neighbour", A], expert=["psst"], neighbour=["hey"]
    )
    tree = await play_tree(hearing(), engine, journal)
    assert shape(tree) == [
        (0, "judge", "the expert, please"),
        (1, "expert", "psst"),
        (2, "judge", "and the neighbour"),
        (3, "neighbour", "hey"),
        (4, "judge", A),
    ]
    heard = {agent_of(request): request.messages[-1]["content"] for request in engine.requests}
    # The neighbour reads the court, and not the chamber.
    assert heard["neighbour"] == ("judge: the expert, please\n\njudge: and the neighbour\n\nDecide now.")


async def test_a_round_may_pass_without_a_turn(journal: Journal) -> None:
    engine = scripted(judge=["let me think", "hm", A])
    record = await play_record(hearing(), engine, journal)
    arrays = Rollouts.of([record]).to_arrays()
    assert arrays["_node_id"].tolist() == [[0, -1, 1, -1, 2]]
    assert arrays["_parent_node_id"].tolist() == [[-1, -1, 0, -1, 1]]
    assert [call.request.messages[-1]["content"] for call in record.calls] == [
        "Begin.", "Go on.", "Decide now.",
    ]  # fmt: skip


async def test_each_branch_goes_where_it_was_sent_itself(journal: Journal) -> None:
    calls = ["the expert", "the neighbour", "nobody"]

    def answer(request):
        if agent_of(request) != "judge":
            return f"I am the {agent_of(request)}"
        return calls.pop(0) if len(request.messages) == 2 else A

    tree = await play_tree(hearing(1), ScriptedEngine(answer), journal, widths={"judge": [3, 1]})
    ways = [[node.text for node in tree.path(leaf)] for leaf in tree.leaves()]
    assert sorted(ways) == sorted(
        [
            ["the expert", "I am the expert", A],
            ["the neighbour", "I am the neighbour", A],
            ["nobody", A],
        ]
    )


TALK = {"hall": frozenset({"ann", "judge"}), "desk": frozenset({"judge"})}
END = (Turn("judge", decide="must"),)


def forked(choose, options, *after, **fields) -> Protocol:
    return Protocol(
        name="forked",
        agents={"ann": Role("speaker"), "judge": Role("verifier", may_decide=True)},
        channels=TALK,
        schedules=(((Turn("ann", ("hall",)),), Fork(choose, options), *after),),
        payoff=lambda outcome: {},
        **fields,
    )


SPEAK = {"speak": (Turn("ann", ("hall",)),), "pass": ()}


@pytest.mark.parametrize(
    ("choose", "options", "after", "message"),
    [
        (
            lambda log: "speak",
            {"speak": (Turn("ann", ("desk",)),)},
            [END],
            "option 'speak' of round 1, and cannot",
        ),
        (lambda log: "pass", {"pass": ()}, [END], "round 1 has no turns"),
        (lambda log: "speak", SPEAK, [], r"the last round \(1\) is a turn of 'ann' that need not decide"),
    ],
)
def test_forks_that_cannot_be_are_refused(choose, options, after, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forked(choose, options, *after)


# Sides.


class Bare(Scenario):
    """Inherits `stance`."""

    def render(self, example, log, agent, turn):
        return [{"role": "system", "content": f"You are {agent}. {log.stance}"}]

    def truth(self, example):
        return 1


async def test_the_prover_is_paid_for_the_side_that_was_drawn(journal: Journal) -> None:
    engine, protocol = scripted(prover=["because"], verifier=[A]), adp(randomize_prover_stance=True)
    for number in range(8):
        tree = await play_tree(protocol, engine, journal, scenario=Bare(), id=f"train/{number}/e/0")
        assert tree.value(None, "prover") == float(tree.stance == 1)
        assert engine.requests[-2].messages[0]["content"] == f"You are prover. {tree.stance}"


async def test_opposed_sides_are_drawn_for_a_play_and_hold_on_all_of_its_branches(journal: Journal) -> None:
    engine = scripted(judge=["the expert", "the neighbour", A], expert=["x"], neighbour=["y"])
    drawn = set()
    for number in range(8):
        trees = [
            await play_tree(
                hearing(), engine, journal, widths=[2, 1], id=f"train/{number}/e/{one}", generation=one
            )
            for one in range(2)
        ]
        first, second = (tree.sides for tree in trees)
        # All episodes of an example are compared, and so draw alike.
        assert first == second
        assert first["neighbour"] == 1 - first["expert"] == 1 - drawn_side(trees[0].key)
        drawn.add(first["expert"])
        for tree in trees:
            for leaf in tree.leaves():
                assert tree.total(leaf, "expert") == (1.0 if first["expert"] else -1.0)
    assert drawn == {0, 1}
