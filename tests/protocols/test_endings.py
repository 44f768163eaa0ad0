"""How plays end, and what becomes of answers that cannot be used."""

from __future__ import annotations

from etude.protocols import EpisodeTree, adp, debate, nip
from etude.store.journal import Journal
from tests.protocols.games import Labelled, example, play_record, play_tree, scripted
from tests.support import ScriptedEngine


async def test_running_out_of_rounds_is_an_ending_of_its_own(journal: Journal) -> None:
    engine = scripted(verifier=["hm"], prover=["well"])
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
    assert verifier.call == 4 and "'maybe' is none of: reject | accept" in verifier.rejected[0].reason
    assert [record.calls[node.call].completion.message["content"] for node in tree.nodes] == [
        "because",
        "Decision: accept",
    ]
    assert len({request.key for request in engine.requests}) == 5


async def test_an_invalid_prover_can_end_the_play_at_a_penalty(journal: Journal) -> None:
    questions = "Question for Expert_1: a?\nQuestion for Expert_2: b?"
    engine = scripted(verifier=[questions], prover0=["fine"], prover1=[""])
    protocol = debate(prover_invalid_response_penalty=-2.0, shared_reward=True)
    tree = await play_tree(protocol, engine, journal, retries=0)
    assert [node.agent for node in tree.nodes] == ["verifier", "prover0", "prover1"]
    assert tree.nodes[-1].ending == "invalid"
    assert [tree.value(None, agent) for agent in tree.agents] == [0.0, -2.0, 0.0]
    assert tree.bounds["prover1"] == (-2.0, 1.0)


async def test_a_forced_guess_is_what_ends_the_play_and_what_is_paid_for(journal: Journal) -> None:
    engine = scripted(prover=["because"], verifier=["Decision: reject"])
    for forced, rewards in (("accept", (-1.0, 1.0)), ("truth", (1.0, 0.0)), (None, (1.0, 0.0))):
        tree = await play_tree(
            adp(force_guess=forced), engine, journal, about=example(0), id=f"train/{forced}/e/0"
        )
        leaf = tree.nodes[-1]
        assert leaf.decision == -1.0
        assert leaf.verdict == (1.0 if forced == "accept" else -1.0)
        assert (tree.value(None, "verifier"), tree.value(None, "prover")) == rewards
    silent = scripted(prover=["because"], verifier=["hm"])
    tree = await play_tree(adp(force_guess="truth"), silent, journal, retries=0, id="train/silent/e/0")
    assert (tree.nodes[-1].ending, tree.nodes[-1].verdict) == ("decided", 1.0)


async def test_where_the_scenario_says_no_side_one_is_drawn_for_all_plays_of_an_example(
    journal: Journal,
) -> None:
    class Sideless(Labelled):
        def stance(self, example):
            return None

    engine = scripted(prover=["because"], verifier=["Decision: accept"])
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
