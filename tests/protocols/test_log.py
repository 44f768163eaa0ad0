"""An agent's view: all on the channels that it reads, nothing else; as arrays, and as a transcript."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.protocols import EpisodeTree, Protocol, adp, as_yaml, debate, mnip, play, transcript
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
