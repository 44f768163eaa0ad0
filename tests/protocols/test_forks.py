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
    Widths,
    adp,
    most_calls,
    nip,
)
from etude.protocols.rules import drawn_side
from etude.store.journal import Journal
from tests.protocols.courts import hearing
from tests.protocols.games import Labelled, agent_of, example, play_record, play_tree, scripted, shape
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


def test_the_most_calls_are_those_of_the_fullest_options() -> None:
    # The judge three times, and a witness after each of the first two.
    assert most_calls(hearing(), Widths.of(1)) == 5
    assert most_calls(hearing(), Widths.of({"judge": 2})) == 2 + 2 + 4 + 4 + 8


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
        (lambda log: "end", {"end": END, "pass": ()}, [], "the last round"),
    ],
)
def test_forks_that_cannot_be_are_refused(choose, options, after, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forked(choose, options, *after)


async def test_a_choice_of_what_is_not_there_fails_the_episode_with_its_round(journal: Journal) -> None:
    protocol = forked(lambda log: log.on("hall")[-1] if log.on("hall") else "pass", SPEAK, END)
    record = await play_record(protocol, scripted(ann=["spaek"], judge=[A]), journal)
    assert record.failure is not None
    assert "protocol 'forked': in round 1, a fork chose 'spaek'" in record.failure.reason
    assert "did you mean 'speak'" in record.failure.reason


async def test_turns_are_counted_as_in_the_longest_play(journal: Journal) -> None:
    """So that whatever a system prompt says of them is the same in all prompts of an agent."""
    seen: list[tuple[int, int]] = []

    class Counting(Labelled):
        def render(self, example, log, agent, turn):
            if agent == "judge":
                seen.append((log.turns_left, log.own_turns))
            return super().render(example, log, agent, turn)

    await play_tree(hearing(), scripted(judge=["nobody", "nobody", A]), journal, scenario=Counting())
    assert seen == [(2, 3), (1, 3), (0, 3)]


# Sides.


class Bare(Scenario):
    """Inherits `stance`."""

    def render(self, example, log, agent, turn):
        return [{"role": "system", "content": f"You are {agent}. {log.stance}"}]

    def truth(self, example):
        return 1


class Inheriting(Bare):
    """Has its `stance` from a class that is not `Scenario`, two steps up."""


class Sided:
    def stance(self, example):
        return 0


class Mixed(Sided, Inheriting):
    pass


async def sides(journal: Journal, scenario, protocol: Protocol, plays: int = 12) -> list[int]:
    engine = scripted(prover=["because"], verifier=["so", A], expert=["x"], neighbour=["y"], judge=[A])
    trees = [
        await play_tree(protocol, engine, journal, scenario=scenario, id=f"train/{number}/e/0")
        for number in range(plays)
    ]
    for request in engine.requests:
        if agent_of(request) == "prover":
            stance = {tree.key: tree.stance for tree in trees}
            assert str(request.messages[0]["content"])[-1] in map(str, stance.values())
    return [tree.stance for tree in trees]


@pytest.mark.parametrize("scenario", [Bare(), Inheriting()])
async def test_a_scenario_that_inherits_its_stance_has_it_drawn(journal: Journal, scenario) -> None:
    assert set(await sides(journal, scenario, nip(randomize_prover_stance=True))) == {0, 1}


async def test_a_stance_that_comes_from_any_class_counts(journal: Journal) -> None:
    assert set(await sides(journal, Mixed(), nip(randomize_prover_stance=True))) == {0}


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


def test_an_unknown_stance_is_refused() -> None:
    with pytest.raises(RequestError, match="the stance of 'judge' is 'random'; it is one of: 0, 1, example"):
        Protocol(
            name="solo",
            agents={"judge": Role("verifier", True, "random")},  # type: ignore[arg-type]
            channels={},
            schedules=((END,),),
            payoff=lambda outcome: {},
        )


async def test_a_stance_that_is_no_verdict_fails_the_episode(journal: Journal) -> None:
    record = await play_record(nip(), scripted(), journal, about=example(1, stance="both"))
    assert record.failure is not None and "stance of example 'e' is 'both'" in record.failure.reason
