"""An agent's view: all on the channels that it reads, nothing else; as arrays, and as a transcript."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.core.errors import RequestError
from etude.protocols import EpisodeTree, Protocol, Rollouts, adp, as_yaml, debate, mnip, play, transcript
from etude.protocols.catalog import PROTOCOLS
from etude.store.journal import Journal
from tests.protocols.games import Labelled, example, find_agent, play_record, play_tree, scripted
from tests.support import ScriptedEngine, drawn

CHANNELS = {"Question for Expert_1:": "prover0_channel", "Question for Expert_2:": "prover1_channel"}


def marked(request: ChatRequest) -> str:
    """An answer with marks that are in no other answer; the verifier decides when it has to."""
    if find_agent(request) != "verifier":
        return f"<{request.key}>"
    if "Decide now." in request.messages[-1]["content"]:
        return f"<{request.key}>\nDecision: accept"
    parts = [f"{header} <{request.key}-{channel}>" for header, channel in CHANNELS.items()]
    return "\n".join(parts)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("nip", {"max_message_rounds": 7}),
    ("nip", {"max_message_rounds": 6, "verifier_first": False}),
    ("adp", {}),
    ("merlin_arthur", {}),
    ("solo_verifier", {}),
    *(
        (name, {"max_message_rounds": rounds, "sequential": sequential, "verifier_first": first})
        for name in ("debate", "mnip")
        for rounds, sequential, first in (
            (7, False, True),
            (6, False, False),
            (10, True, True),
            (9, True, False),
        )
    ),
]


@settings(max_examples=drawn(2), deadline=None)
@given(seed=st.integers(0, 1000))
@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_a_prompt_holds_all_that_was_said_where_the_agent_reads(
    name: str, parameters: dict[str, Any], seed: int
) -> None:
    protocol = PROTOCOLS[name](**parameters)
    engine = ScriptedEngine(marked)
    engines = dict.fromkeys(protocol.agents, engine)
    tree = asyncio.run(play(protocol, Labelled(), engines, example(), widths=[2, 1], seed=seed))
    for node in tree.nodes:
        found = set(
            re.findall(r"<[^>]+>", str([one["content"] for one in engine.requests[node.call].messages]))
        )
        assert found == _visible(tree, protocol, node.id)


def _visible(tree: EpisodeTree, protocol: Protocol, index: int) -> set[str]:
    """The marks of earlier rounds that the agent of a node wrote itself, or reads."""
    reader = tree.nodes[index]
    marks: set[str] = set()
    for node in tree.path(reader):
        if node.round == reader.round:
            continue
        said = [
            text
            for channel, text in node.messages.items()
            if reader.agent in protocol.channels[channel] or node.agent == reader.agent
        ]
        marks |= set(re.findall(r"<[^>]+>", node.text if node.agent == reader.agent else str(said)))
    return marks


async def test_who_is_spoken_to_is_told_where_it_matters(journal: Journal) -> None:
    questions = "Question for Expert_1: a?\nQuestion for Expert_2: b?"
    engine = scripted(verifier=[questions, "Decision: accept"], prover0=["no"], prover1=["yes"])
    await play_tree(debate(randomize_channel_order=False), engine, journal)
    heard = {find_agent(request): request.messages[-1]["content"] for request in engine.requests}
    assert heard == {
        "prover0": "Verifier (to you): a?\n\nVerifier (to Expert_2): b?",
        "prover1": "Verifier (to Expert_1): a?\n\nVerifier (to you): b?",
        "verifier": "Expert_1: no\n\nExpert_2: yes",
    }


async def test_the_order_of_channels_is_drawn_for_each_round_and_stays(journal: Journal) -> None:
    engine = ScriptedEngine(marked)
    protocol = mnip(max_message_rounds=9)
    orders = set()
    for episode in range(8):
        tree = await play_tree(protocol, engine, journal, id=f"train/{episode}/e/0")
        prompts = [request.messages for request in engine.requests if find_agent(request) == "verifier"][-5:]
        for before, after in pairwise(prompts):
            assert after[: len(before)] == before
        for message in prompts[-1]:
            if message["role"] == "user" and "Expert" in message["content"]:
                orders.add(message["content"].index("Expert_1") < message["content"].index("Expert_2"))
        assert len(tree.nodes) == 13
    assert orders == {True, False}


QUESTIONS = "Question for Expert_1: a?\nQuestion for Expert_2: b?"


async def test_what_is_where(journal: Journal) -> None:
    engine = scripted(verifier=[QUESTIONS, "Decision: reject"], prover0=["no"], prover1=["yes"])
    protocol = mnip(max_message_rounds=5, verifier_no_guess_reward=0.25)
    about = example(0, stance=0, question="q", solution="s")
    record = await play_record(protocol, engine, journal, about=about)
    arrays = Rollouts.of([record]).to_arrays()
    assert arrays["round"].tolist() == [[0, 1, 2, 3, 3]]
    assert (arrays["y"].tolist(), arrays["prover_stance"].tolist()) == ([[0] * 5], [[0] * 5])
    assert [arrays[key].tolist() for key in ("question", "solution")] == [[["q"] * 5], [["s"] * 5]]
    assert arrays["datapoint_id"].tolist() == [["e"] * 5]
    assert arrays["padding"].tolist() == [[False, False, False, True, True]]

    said = [["a?", "b?"], ["no", "yes"], [None, None], [None, None], [None, None]]
    nothing = [[None, None]] * 5
    history = arrays["message_history"][0].tolist()
    assert history[0] == nothing
    assert history[1] == [said[0], *nothing[1:]]
    assert history[2] == history[3] == history[4] == said
    # Agents in their order: prover0, prover1, verifier.
    assert arrays["message_agent_id"][0, 4].tolist() == [[2, 2], [0, 1], [-1, -1], [-1, -1], [-1, -1]]
    raw = arrays["raw_message_history"][0, 3].tolist()
    assert raw[:3] == [[None, None, QUESTIONS], ["no", "yes", None], [None, None, "Decision: reject"]]

    agents = arrays["agents"]
    assert agents["decision"][0].tolist() == [[2, 2, 2], [2, 2, 2], [2, 2, 0], [2, 2, 2], [2, 2, 2]]
    assert agents["continuous_decision"][0, 2].tolist() == [0.0, 0.0, -1.0]
    # Both provers argue for accept, and the verifier rightly rejects, after one idle turn.
    rewards = [[0.0, 0.0, 0.25], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert arrays["next"]["agents"]["reward"][0].tolist() == rewards


async def test_each_way_that_a_play_went_is_a_row(journal: Journal) -> None:
    engine = scripted(prover=["because"], verifier=["Decision: accept"])
    records = [
        await play_record(adp(), engine, journal, widths=2, id=f"train/{epoch}/e/0") for epoch in range(2)
    ]
    arrays = Rollouts.of(records).to_arrays()
    assert arrays["y"].shape == (8, 2)
    assert arrays["message_history"].shape == (8, 2, 2, 1)
    assert arrays["raw_message_history"].shape == (8, 2, 2, 2)
    assert arrays["y"].dtype == np.int64


def test_without_episodes_there_are_no_arrays() -> None:
    with pytest.raises(RequestError, match="no finished episodes"):
        Rollouts.of([]).to_arrays()


async def test_a_play_reads_from_top_to_bottom(journal: Journal) -> None:
    engine = scripted(prover=["one\ntwo  ", "x"], verifier=["Decision: accept"])
    record = await play_record(adp(), engine, journal, about=example(1, question="is it so?"))
    assert as_yaml(transcript(record)) == (
        "---\n"
        "episode: train/1/e/0\n"
        "example: e\n"
        "inputs:\n"
        "  label: 1\n"
        "  question: is it so?\n"
        "protocol: adp\n"
        "truth: accept\n"
        "prover_stance: accept\n"
        "rewards:\n"
        "  prover: 1.0\n"
        "  verifier: 1.0\n"
        "turns:\n"
        "- round: 0\n"
        "  prover@main: |-\n"
        "    one\n"
        "    two\n"
        "- round: 1\n"
        "  verifier.decision: accept (1)\n"
        "ending: decided\n"
    )


async def test_thinking_stands_before_the_answer_and_is_told_to_nobody(journal: Journal) -> None:
    thought = {"role": "assistant", "content": "one", "reasoning_content": "a secret"}
    engine = scripted(prover=[thought], verifier=["Decision: accept"])
    record = await play_record(adp(), engine, journal)
    assert transcript(record)["turns"][0] == {"round": 0, "prover.thinking": "a secret", "prover@main": "one"}
    assert not any("secret" in str(request.messages) for request in engine.requests)


async def test_yaml_says_the_same(journal: Journal) -> None:
    questions = "Question for Expert_1: a?\nQuestion for Expert_2: b\n  c?"
    engine = scripted(verifier=[questions, "hm"], prover0=["no – «never»"], prover1=[""])
    record = await play_record(debate(max_message_rounds=3), engine, journal, retries=1)
    shown = transcript(record)
    assert yaml.safe_load(as_yaml(shown)) == shown
    assert "«never»" in as_yaml(shown)


async def test_where_a_play_branched_the_branches_are_shown(journal: Journal) -> None:
    engine = scripted(prover=["because"], verifier=["Decision: accept"])
    record = await play_record(adp(), engine, journal, widths={"prover": 2})
    shown = transcript(record)
    assert shown["turns"] == []
    assert [len(branch["turns"]) for branch in shown["branches"]] == [2, 2]
    assert [branch["rewards"] for branch in shown["branches"]] == [{"prover": 1.0, "verifier": 1.0}] * 2
    deeper = await play_record(adp(), engine, journal, widths=2, id="train/2/e/0")
    [first, _] = transcript(deeper)["branches"]
    assert list(first) == ["value", "turns", "branches"]
    assert [len(branch["turns"]) for branch in first["branches"]] == [1, 1]
