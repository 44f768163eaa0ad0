"""Properties of plays with votes, forks, drawn sides, and payoffs that look at what was said."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.protocols import EpisodeTree, Protocol, Widths, most_calls, play
from etude.protocols.rules import Facts, drawn_side, next_round, resolve, voters_of
from etude.protocols.scenario import play_log
from etude.protocols.tree import Node
from tests.protocols.courts import RULES, Crowd, Offers, bargain, deliberation, hearing, jury, roll_call
from tests.protocols.games import Labelled, example

PROTOCOLS = st.one_of(
    st.builds(jury, st.sampled_from([*RULES]), st.integers(1, 3)),
    st.builds(roll_call, st.sampled_from([*RULES])),
    st.builds(deliberation, st.integers(1, 3)),
    st.builds(hearing, st.integers(1, 3)),
    st.builds(bargain, st.integers(1, 4)),
)
WIDTHS = st.sampled_from([1, [2, 1], [1, 2, 1]])


def branched(protocol: Protocol, seed: int, widths: Any) -> tuple[EpisodeTree, Crowd]:
    engine = Crowd()
    engines = dict.fromkeys(protocol.agents, engine)
    scenario = Offers() if protocol.name == "bargain" else Labelled()
    about = example(seed % 2)
    return (
        asyncio.run(play(protocol, scenario, engines, about, widths=widths, seed=seed, retries=1)),
        engine,
    )


def rounds_of(path: list[Node]) -> list[list[Node]]:
    return [[node for node in path if node.round == number] for number in sorted({n.round for n in path})]


@settings(max_examples=40, deadline=None)
@given(PROTOCOLS, st.integers(0, 99), WIDTHS)
def test_every_way_is_one_that_the_protocol_allows(protocol: Protocol, seed: int, widths: Any) -> None:
    tree, engine = branched(protocol, seed, widths)
    assert len(engine.requests) <= most_calls(protocol, Widths.of(widths), retries=1)
    schedule, drawn = protocol.rounds(tree.key), drawn_side(tree.key)
    facts = Facts(tree.truth, tree.stance, drawn, voters_of(protocol, schedule))
    for leaf in tree.leaves():
        path = tree.path(leaf)
        totals = dict.fromkeys(tree.agents, 0.0)
        said: list[Node] = []
        for nodes in rounds_of(path):
            # The round is the one that follows from what was said before it, on this way.
            number, turns = next_round(schedule, said[-1].round + 1 if said else 0, play_log(said)) or (
                None,
                (),
            )
            assert (number, [turn.agent for turn in turns]) == (nodes[0].round, [n.agent for n in nodes])
            said += nodes
            log = play_log(said)
            last = next_round(schedule, nodes[0].round + 1, log) is None
            outcome = resolve(protocol, facts, turns, log, last=last)
            earned = protocol.payoff(outcome)
            assert {agent: value for agent, value in earned.items() if value} == dict(nodes[-1].rewards)
            assert outcome.over == (nodes[-1] is leaf)
            totals = {agent: value + earned.get(agent, 0.0) for agent, value in totals.items()}
        for agent, (low, high) in tree.bounds.items():
            assert tree.total(leaf, agent) == pytest.approx(totals[agent])
            assert low - 1e-9 <= totals[agent] <= high + 1e-9
        assert (leaf.ending == "decided") == (leaf.verdict is not None)
    assert EpisodeTree.from_json(json.loads(json.dumps(tree.to_json()))) == tree


@settings(max_examples=15, deadline=None)
@given(PROTOCOLS, st.integers(0, 99))
def test_each_prompt_of_an_agent_begins_with_the_one_before(protocol: Protocol, seed: int) -> None:
    tree, engine = branched(protocol, seed, 1)
    asked = {request.key: request for request in engine.requests}
    assert len(asked) == len(engine.requests)
    [leaf] = tree.leaves()
    for agent in tree.agents:
        prompts = [engine.requests[node.call].messages for node in tree.path(leaf) if node.agent == agent]
        for before, after in pairwise(prompts):
            assert list(after[: len(before)]) == list(before)
