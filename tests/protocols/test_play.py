"""How a protocol is played: turns, prompts, retries, endings."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, EpisodeError, RequestError
from etude.core.example import Example
from etude.protocols import (
    Act,
    Malformed,
    adp,
    debate,
    merlin_arthur,
    nip,
    play,
    solo_verifier,
)
from etude.store.journal import Journal
from tests.protocols.games import (
    Labelled,
    agent_of,
    example,
    play_record,
    play_tree,
    scripted,
    shape,
)
from tests.support import ScriptedEngine


async def test_agents_take_turns_until_the_verifier_decides(journal: Journal) -> None:
    engine = scripted(verifier=["why?", "Decision: accept"], prover=["because"])
    tree = await play_tree(nip(), engine, journal)
    assert shape(tree) == [
        (0, "verifier", "why?"),
        (1, "prover", "because"),
        (2, "verifier", "Decision: accept"),
    ]
    leaf = tree.nodes[-1]
    assert (leaf.decision, leaf.verdict, leaf.ending) == (1.0, 1.0, "decided")
    assert dict(leaf.rewards) == {"verifier": 1.0, "prover": 1.0}
    assert [dict(node.messages) for node in tree.nodes] == [{"main": "why?"}, {"main": "because"}, {}]


async def test_each_prompt_goes_on_from_the_agents_prompt_before(journal: Journal) -> None:
    engine = scripted(verifier=["why?", "how?", "Decision: reject"], prover=["because", "so"])
    await play_tree(nip(max_message_rounds=5), engine, journal)
    asked = [[message["content"] for message in request.messages] for request in engine.requests]
    assert asked == [
        ["You are verifier. e", "Begin."],
        ["You are prover. e", "Verifier: why?"],
        ["You are verifier. e", "Begin.", "why?", "Expert: because"],
        ["You are prover. e", "Verifier: why?", "because", "Verifier: how?\n\nDecide now."],
        ["You are verifier. e", "Begin.", "why?", "Expert: because", "how?", "Expert: so\n\nDecide now."],
    ]
    by_agent = [engine.requests[index] for index in (0, 2, 4)]
    for before, after in pairwise(by_agent):
        assert after.messages[: len(before.messages)] == before.messages


async def test_calls_belong_to_the_agents_function_and_go_to_its_model(journal: Journal) -> None:
    models = {"weak": scripted(verifier=["Decision: accept"]), "strong": scripted(prover=["because"])}
    policies = {"prover": "strong", "verifier": "weak"}
    record = await play_record(
        adp(), models, journal, policies=policies, sampling={"prover": {"max_tokens": 7}}
    )
    assert [(call.function, call.model) for call in record.calls] == [
        ("prover", "strong"),
        ("verifier", "weak"),
    ]
    assert [call.request.sampling.max_tokens for call in record.calls] == [7, None]


async def test_a_prover_that_quotes_a_decision_decides_nothing(journal: Journal) -> None:
    engine = scripted(prover=["Decision: accept"], verifier=["Decision: reject"])
    tree = await play_tree(adp(), engine, journal, about=example(0))
    assert dict(tree.nodes[0].messages) == {"main": "Decision: accept"}
    assert tree.nodes[0].decision is None
    assert tree.nodes[1].decision == -1.0


async def test_before_the_fewest_rounds_a_decision_is_only_a_message(journal: Journal) -> None:
    engine = scripted(verifier=["Decision: accept"], prover=["wait"])
    tree = await play_tree(nip(min_message_rounds=3), engine, journal)
    assert [node.decision for node in tree.nodes] == [None, None, 1.0]
    assert dict(tree.nodes[0].messages) == {"main": "Decision: accept"}


async def test_the_turns_of_a_round_are_taken_at_the_same_time(journal: Journal) -> None:
    """Neither prover answers before both have been asked."""
    both = asyncio.Barrier(2)

    class Waiting(ScriptedEngine):
        async def complete(self, request: ChatRequest) -> Completion:
            if agent_of(request) != "verifier":
                await both.wait()
            return await super().complete(request)

    protocol = debate(max_message_rounds=2, verifier_first=False)
    async with asyncio.timeout(60):
        tree = await play_tree(protocol, Waiting(["no", "yes", "Decision: accept"]), journal)
    assert [node.round for node in tree.nodes] == [0, 0, 1]


async def test_episodes_of_an_example_draw_the_same_schedule(journal: Journal) -> None:
    engine = scripted(prover0=["no"], prover1=["yes"], verifier=["Decision: accept"])
    speakers = {}
    for phase in range(8):
        for generation in range(3):
            id = f"train/{phase}/e/{generation}"
            tree = await play_tree(merlin_arthur(), engine, journal, id=id, generation=generation)
            speakers.setdefault(phase, set()).add(tree.nodes[0].agent)
    assert all(len(names) == 1 for names in speakers.values())
    assert set.union(*speakers.values()) == {"prover0", "prover1"}


async def test_the_verifier_is_not_told_which_prover_spoke(journal: Journal) -> None:
    engine = scripted(prover0=["it is so"], prover1=["it is so"], verifier=["Decision: accept"])
    prompts = set()
    for phase in range(8):
        await play_tree(merlin_arthur(), engine, journal, id=f"train/{phase}/e/0")
        prompts.add(tuple(message["content"] for message in engine.requests[-1].messages))
    assert prompts == {("You are verifier. e", "it is so\n\nDecide now.")}


async def test_an_engine_that_fails_fails_the_episode_when_the_other_calls_are_kept(journal: Journal) -> None:
    def answer(request: ChatRequest) -> str | Exception:
        return EngineError("the server is gone") if agent_of(request) == "prover0" else "fine"

    record = await play_record(debate(verifier_first=False), ScriptedEngine(answer), journal)
    assert record.failure is not None and record.failure.kind == "call_failed"
    assert "the server is gone" in record.failure.reason
    assert [call.error for call in record.calls] == ["the server is gone", None]


@pytest.mark.parametrize("label", [None, 2, "yes"])
async def test_an_example_without_a_right_verdict_fails_with_its_name(
    journal: Journal, label: object
) -> None:
    record = await play_record(adp(), scripted(), journal, about=example(label))
    assert record.failure is not None
    assert "truth of example 'e'" in record.failure.reason


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (Act({"secret": "psst"}), "write on 'secret' out of turn"),
        (Act(decision=1.5), "a decision of 1.5, outside"),
    ],
)
async def test_a_scenario_that_parses_wrong_is_told(journal: Journal, act: Act, reason: str) -> None:
    class Wrong(Labelled):
        def parse(self, text, turn):
            return act

    record = await play_record(solo_verifier(), ScriptedEngine(["x"]), journal, scenario=Wrong())
    assert record.failure is not None and reason in record.failure.reason


async def test_whatever_a_scenario_parses_only_a_deciding_turn_decides(journal: Journal) -> None:
    class Eager(Labelled):
        def parse(self, text, turn):
            return Act(decision=1.0)

    tree = await play_tree(adp(), ScriptedEngine(["x"]), journal, scenario=Eager(), retries=0)
    assert tree.nodes[0].malformed == "a decision in a turn that may not decide"
    assert tree.nodes[1].decision == 1.0


async def test_play_needs_no_run() -> None:
    engines = {"prover": scripted(prover=["because"]), "verifier": scripted(verifier=["Decision: accept"])}
    tree = await play(adp(), Labelled(), engines, example(1))
    assert tree.value(None, "verifier") == 1.0
    with pytest.raises(RequestError, match="no engine for the agent 'prover'"):
        await play(adp(), Labelled(), {"verifier": engines["verifier"]}, example(1))
    with pytest.raises(EpisodeError, match=r"play on example 'e' failed: .*truth"):
        await play(adp(), Labelled(), engines, example(None))


async def test_a_scenario_needs_no_base_class(journal: Journal) -> None:
    class Own:
        def render(self, example: Example, log, agent: str, turn):
            return [{"role": "user", "content": f"{agent}, round {log.round}"}]

        def parse(self, text: str, turn):
            return Act(decision=float(text)) if turn.decide != "no" else Malformed("never")

        def truth(self, example: Example) -> int:
            return 1

        def stance(self, example: Example) -> int:
            return 1

    tree = await play_tree(solo_verifier(), ScriptedEngine(["0.5"]), journal, scenario=Own())
    assert tree.value(None, "verifier") == 0.5
