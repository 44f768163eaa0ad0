"""An agent's view: all on the channels that it reads, nothing else; as arrays."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.protocols import EpisodeTree, Protocol, adp, debate, mnip, play
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


async def test_thinking_is_told_to_nobody(journal: Journal) -> None:
    thought = {"role": "assistant", "content": "one", "reasoning_content": "a secret"}
    engine = scripted(prover=[thought], verifier=["Decision: accept"])
    await play_record(adp(), engine, journal)
    assert not any("secret" in str(request.messages) for request in engine.requests)
