"""Reading answers: who may decide, and what is sent on which channel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.protocols import SCALES, Act, Malformed, Turn
from etude.protocols.scenario import parse_answer

SPEAK = Turn("prover", ("main",))
MAY = Turn("verifier", ("main",), "may")
MUST = Turn("verifier", (), "must")
OUT_OF_100 = SCALES["out_of_100"]
NO_DECISION = "no decision in a turn that must decide; it is written 'Decision: reject | accept'"
BOTH = Turn("verifier", ("a", "b"), "may", headers=("To Ann:", "To Bob:"))


@pytest.mark.parametrize(
    "text",
    [
        "Decision: accept",
        "decision:accept",
        "**Decision:** Accept.",
        "I have read it.\n\nMy final decision: accept",
        "## Decision: **accept** (line 3 is right)",
        "Decision:\naccept",
        "Decision: accept\nDecision: accept",
    ],
)
def test_a_decision_stands_on_a_line_of_its_own(text: str) -> None:
    for turn in (MAY, MUST, BOTH):
        assert parse_answer(text, turn) == Act(decision=1.0)


@given(st.text(max_size=60))
def test_a_turn_that_may_not_decide_never_does(text: str) -> None:
    for said in (text, f"Decision: accept{text}", f"{text}\nDecision: reject"):
        act = parse_answer(said, SPEAK)
        assert act == (Act({"main": said.strip()}) if said.strip() else Malformed("an empty answer"))


@given(st.text(max_size=60))
def test_a_turn_that_must_decide_never_speaks(text: str) -> None:
    act = parse_answer(text, MUST)
    assert isinstance(act, Malformed) or (act.decision is not None and not act.messages)


@pytest.mark.parametrize(
    ("text", "turn", "reason"),
    [
        ("Decision: maybe", MAY, "the decision 'maybe' is none of: reject | accept"),
        ("Decision:", MAY, "the decision '' is none of: reject | accept"),
        ("Decision: 120", Turn("v", (), "must", OUT_OF_100), "the decision '120' is none of: 0 … 100"),
        ("Decision: accept\nDecision: reject", MAY, "several decisions: accept, reject"),
        ("I cannot tell", MUST, NO_DECISION),
        ("", MUST, NO_DECISION),
        ("  \n", MAY, "an empty answer"),
        ("To Ann: hello", BOTH, "no part that starts with 'To Bob:'"),
        ("To Ann:\nTo Bob: hello", BOTH, "nothing after 'To Ann:'"),
    ],
)
def test_what_cannot_be_used_says_why(text: str, turn: Turn, reason: str) -> None:
    assert parse_answer(text, turn) == Malformed(reason)


def test_several_channels_have_a_part_each_in_any_order() -> None:
    expected = Act({"a": "hello\nthere", "b": "and you"})
    assert parse_answer("To Ann: hello\nthere\nTo Bob: and you", BOTH) == expected
    assert parse_answer("Well.\n**to bob:** and you\n**To Ann:**\nhello\nthere ", BOTH) == expected
