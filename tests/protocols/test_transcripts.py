"""Transcripts: what a person reads."""

from __future__ import annotations

import yaml

from etude.protocols import adp, as_yaml, debate, transcript
from etude.store.journal import Journal
from tests.protocols.games import example, play_record, scripted


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
    assert transcript(record)["turns"][0] == {
        "round": 0,
        "prover.thinking": "a secret",
        "prover@main": "one",
    }
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
