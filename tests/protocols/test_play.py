"""How a protocol is played: turns, prompts, retries, endings; and what each agent sees of it."""

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, EpisodeError
from etude.protocols import (
    EpisodeTree,
    Move,
    Protocol,
    adp,
    debate,
    merlin_arthur,
    mnip,
    nip,
    play,
    solo_verifier,
)
from etude.protocols.catalog import PROTOCOLS
from etude.store.journal import Journal
from tests.protocols.games import Labelled, example, find_agent, play_record, play_tree, script, shape
from tests.support import ScriptedEngine, draws


async def test_agents_take_turns_until_the_verifier_decides(journal: Journal) -> None:
    engine = script(verifier=["why?", "Decision: accept"], prover=["because"])
    tree = await play_tree(nip(), engine, journal)
    expected = [(0, "verifier", "why?"), (1, "prover", "because"), (2, "verifier", "Decision: accept")]
    assert shape(tree) == expected
    leaf = tree.nodes[-1]
    assert (leaf.decision, leaf.verdict, leaf.ending) == (1.0, 1.0, "decided")
    assert dict(leaf.rewards) == {"verifier": 1.0, "prover": 1.0}
    assert [dict(node.messages) for node in tree.nodes] == [{"main": "why?"}, {"main": "because"}, {}]


async def test_calls_belong_to_the_agents_function_and_go_to_its_model(journal: Journal) -> None:
    models = {"weak": script(verifier=["Decision: accept"]), "strong": script(prover=["because"])}
    policies = {"prover": "strong", "verifier": "weak"}
    record = await play_record(adp(), models, journal, policies=policies)
    assert [(call.function, call.model) for call in record.calls] == [
        ("prover", "strong"),
        ("verifier", "weak"),
    ]


async def test_the_turns_of_a_round_are_taken_at_the_same_time(journal: Journal) -> None:
    """Neither prover answers before both have been asked."""
    both = asyncio.Barrier(2)

    class Waiting(ScriptedEngine):
        async def complete(self, request: ChatRequest) -> Completion:
            if find_agent(request) != "verifier":
                await both.wait()
            return await super().complete(request)

    protocol = debate(max_message_rounds=2, verifier_first=False)
    async with asyncio.timeout(60):
        tree = await play_tree(protocol, Waiting(["no", "yes", "Decision: accept"]), journal)
    assert [node.round for node in tree.nodes] == [0, 0, 1]


async def test_the_verifier_is_not_told_which_prover_spoke(journal: Journal) -> None:
    engine = script(prover0=["it is so"], prover1=["it is so"], verifier=["Decision: accept"])
    prompts = set()
    for phase in range(8):
        await play_tree(merlin_arthur(), engine, journal, id=f"train/{phase}/e/0")
        prompts.add(tuple(message["content"] for message in engine.requests[-1].messages))
    assert prompts == {("You are verifier. e", "it is so\n\nDecide now.")}


async def test_an_engine_that_fails_fails_the_episode_when_the_other_calls_are_kept(journal: Journal) -> None:
    def answer(request: ChatRequest) -> str | Exception:
        return EngineError("the server is gone") if find_agent(request) == "prover0" else "fine"

    record = await play_record(debate(verifier_first=False), ScriptedEngine(answer), journal)
    assert record.failure is not None and record.failure.kind == "call_failed"
    assert "the server is gone" in record.failure.reason
    assert [call.error for call in record.calls] == ["the server is gone", None]


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (Move({"secret": "psst"}), "write on 'secret' out of turn"),
        (Move(decision=1.5), "the decision 1.5, outside"),
        (None, "parse returned None; return a Move"),
    ],
)
async def test_a_scenario_that_parses_wrong_is_told(journal: Journal, act: Any, reason: str) -> None:
    class Wrong(Labelled):
        def parse(self, text, turn):
            return act

    record = await play_record(solo_verifier(), ScriptedEngine(["x"]), journal, scenario=Wrong())
    assert record.failure is not None and reason in record.failure.reason


async def test_play_needs_no_run() -> None:
    engines = {"prover": script(prover=["because"]), "verifier": script(verifier=["Decision: accept"])}
    assert (await play(adp(), Labelled(), engines, example(1))).value(None, "verifier") == 1.0
    with pytest.raises(EpisodeError, match=r"'e' failed: .*truth"):
        await play(adp(), Labelled(), engines, example(None))


async def test_running_out_of_rounds_is_an_ending_of_its_own(journal: Journal) -> None:
    engine = script(verifier=["hm"], prover=["well"])
    terms = {"verifier_terminated_penalty": -3.0, "verifier_no_guess_reward": 0.25}
    tree = await play_tree(nip(max_message_rounds=5, **terms), engine, journal, retries=0)
    assert [node.rewards.get("verifier") for node in tree.nodes] == [0.25, None, 0.25, None, -3.0]
    assert tree.nodes[-1].ending == "undecided"
    assert "must decide" in str(tree.nodes[-1].malformed)
    assert tree.value(None, "verifier") == -2.5
    assert tree.value(None, "prover") == 0.0


async def test_malformed_answers_are_asked_for_again_and_then_count(journal: Journal) -> None:
    engine = ScriptedEngine(["", "", "because", "Decision: maybe", "Decision: accept"])
    record = await play_record(adp(), engine, journal, retries=2)
    tree = EpisodeTree.from_json(record.output)
    prover, verifier = tree.nodes
    assert (prover.call, prover.text) == (2, "because")
    assert [(one.call, one.reason) for one in prover.rejected] == [
        (0, "an empty answer"),
        (1, "an empty answer"),
    ]
    assert verifier.call == 4 and "'maybe'" in verifier.rejected[0].reason
    assert [record.calls[node.call].completion.message["content"] for node in tree.nodes] == [
        "because",
        "Decision: accept",
    ]
    assert len({request.key for request in engine.requests}) == 5


async def test_an_invalid_prover_can_end_the_play_at_a_penalty(journal: Journal) -> None:
    questions = "Question for Expert_1: a?\nQuestion for Expert_2: b?"
    engine = script(verifier=[questions], prover0=["fine"], prover1=[""])
    protocol = debate(prover_invalid_response_penalty=-2.0, shared_reward=True)
    tree = await play_tree(protocol, engine, journal, retries=0)
    assert [node.agent for node in tree.nodes] == ["verifier", "prover0", "prover1"]
    assert tree.nodes[-1].ending == "invalid"
    assert [tree.value(None, agent) for agent in tree.agents] == [0.0, -2.0, 0.0]
    assert tree.bounds["prover1"] == (-2.0, 1.0)


async def test_a_forced_guess_is_what_ends_the_play_and_what_is_paid_for(journal: Journal) -> None:
    engine = script(prover=["because"], verifier=["Decision: reject"])
    for forced, rewards in (("accept", (-1.0, 1.0)), ("truth", (1.0, 0.0)), (None, (1.0, 0.0))):
        tree = await play_tree(
            adp(force_guess=forced), engine, journal, about=example(0), id=f"train/{forced}/e/0"
        )
        leaf = tree.nodes[-1]
        assert leaf.decision == -1.0
        assert leaf.verdict == (1.0 if forced == "accept" else -1.0)
        assert (tree.value(None, "verifier"), tree.value(None, "prover")) == rewards
    silent = script(prover=["because"], verifier=["hm"])
    tree = await play_tree(adp(force_guess="truth"), silent, journal, retries=0, id="train/silent/e/0")
    assert (tree.nodes[-1].ending, tree.nodes[-1].verdict) == ("decided", 1.0)


async def test_where_the_scenario_says_no_side_one_is_drawn_for_all_plays_of_an_example(
    journal: Journal,
) -> None:
    class Sideless(Labelled):
        def stance(self, example):
            return None

    engine = script(prover=["because"], verifier=["Decision: accept"])
    drawn = set()
    for number in range(16):
        ids = [f"train/{number}/e/{generation}" for generation in range(2)]
        trees = [
            await play_tree(
                adp(randomize_prover_stance=True),
                engine,
                journal,
                scenario=Sideless(),
                widths=[2, 1],
                id=id,
                generation=generation,
            )
            for generation, id in enumerate(ids)
        ]
        assert trees[0].stance == trees[1].stance
        assert {tree.value(None, "prover") for tree in trees} == {float(trees[0].stance)}
        drawn.add(trees[0].stance)
    assert drawn == {0, 1}


CHANNELS = {"Question for Expert_1:": "prover0_channel", "Question for Expert_2:": "prover1_channel"}


def mark(request: ChatRequest) -> str:
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


@settings(max_examples=draws(2), deadline=None)
@given(seed=st.integers(0, 1000))
@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_a_prompt_holds_all_that_was_said_where_the_agent_reads(
    name: str, parameters: dict[str, Any], seed: int
) -> None:
    protocol = PROTOCOLS[name](**parameters)
    engine = ScriptedEngine(mark)
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
    engine = script(verifier=[questions, "Decision: accept"], prover0=["no"], prover1=["yes"])
    await play_tree(debate(randomize_channel_order=False), engine, journal)
    heard = {find_agent(request): request.messages[-1]["content"] for request in engine.requests}
    assert heard == {
        "prover0": "Verifier (to you): a?\n\nVerifier (to Expert_2): b?",
        "prover1": "Verifier (to Expert_1): a?\n\nVerifier (to you): b?",
        "verifier": "Expert_1: no\n\nExpert_2: yes",
    }


async def test_the_order_of_channels_is_drawn_for_each_round_and_stays(journal: Journal) -> None:
    engine = ScriptedEngine(mark)
    protocol = mnip(max_message_rounds=9)
    orders = set()
    for episode in range(8):
        tree = await play_tree(protocol, engine, journal, id=f"train/{episode}/e/0")
        prompts = [request.messages for request in engine.requests if find_agent(request) == "verifier"]
        for message in prompts[-1]:
            if message["role"] == "user" and "Expert" in message["content"]:
                orders.add(message["content"].index("Expert_1") < message["content"].index("Expert_2"))
        assert len(tree.nodes) == 13
    assert orders == {True, False}


async def test_thinking_is_told_to_nobody(journal: Journal) -> None:
    thought = {"role": "assistant", "content": "one", "reasoning_content": "a secret"}
    engine = script(prover=[thought], verifier=["Decision: accept"])
    await play_record(adp(), engine, journal)
    assert not any("secret" in str(request.messages) for request in engine.requests)
