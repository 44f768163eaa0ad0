"""A protocol cannot be built wrong; its scales of decisions, who may decide, and what is sent where."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.errors import RequestError
from etude.protocols import SCALES, Malformed, Move, Outcome, Protocol, Role, Turn
from etude.protocols.scenario import parse_answer

ROLES = {"judge": Role("verifier", may_decide=True), "ann": Role("prover"), "bob": Role("prover")}
HALL = {"hall": frozenset({"judge", "ann", "bob"}), "desk": frozenset({"judge", "ann"})}
ASK = (Turn("ann", ("hall",)),)
END = (Turn("judge", decide="must"),)


def pay(outcome: Outcome) -> dict[str, float]:
    """One for those who hear `accept`, and a little for each idle turn."""
    if outcome.decision is None:
        return {"judge": 0.25} if outcome.decider == "judge" else {}
    return {
        "judge": outcome.decision * (1 if outcome.truth else -1),
        "ann": 1.0 if outcome.decision > 0 else 0.0,
    }


def build(*rounds: tuple[Turn, ...], **fields: Any) -> Protocol:
    given: dict[str, Any] = {
        "name": "talk",
        "agents": ROLES,
        "channels": HALL,
        "schedules": (rounds,),
        "payoff": pay,
        **fields,
    }
    return Protocol(**given)


def test_a_good_protocol_is_built_and_cannot_be_changed() -> None:
    protocol = build(ASK, END)
    assert protocol.max_rounds == 2
    assert protocol.writers("hall") == {"ann"}
    assert build(ASK, needs_verdict=False).max_rounds == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        protocol.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        protocol.agents["eve"] = Role("prover")  # type: ignore[index]


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([(Turn("ann", ("hall",)), Turn("bob", ("hall",))), END], "'ann' and 'bob' .*channel"),
        ([(Turn("bob", ("desk",)),), END], "'bob' writes .*'desk' in round 0, .*read"),
        ([(Turn("ann", ("hall",), "must"),)], "'ann' must .* round 0.* role"),
        ([ASK], r"the last round \(0\) .*'ann' to decide"),
        ([END, END], ".*follow round 0, .*decide"),
        ([(Turn("ann", ("hall",)), Turn("ann", ("desk",))), END], "'ann' .*two turns .*round 0"),
        ([(Turn("ann"),), END], "'ann' neither .* in round 0"),
        ([(Turn("anne", ("hall",)),), END], "round 0 .*'anne', .*'ann'"),
        ([(), END], "round 0 has no turns"),
        ([Turn("ann", ("hall",)), END[0]], "`schedules` has schedules, which have rounds"),
    ],
)
def test_schedules_that_cannot_be_played_are_refused(rounds: list, message: str) -> None:
    with pytest.raises(RequestError, match=f"protocol 'talk': {message}"):
        build(*rounds)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"channels": {"hall": frozenset({"eve"})}}, "channel 'hall' .*'eve'"),
        (
            {
                "agents": ROLES | {"ann": Role("prover", may_decide=True), "bob": Role("prover")},
                "schedules": (((Turn("ann", ("hall",)), *END),),),
            },
            "ann and judge .* in round 0",
        ),
        ({"bounds": {"judge": (-1.0, 1.0)}}, "'ann' has no bounds"),
        (
            {"bounds": {"judge": (1.0, -1.0)} | dict.fromkeys(("ann", "bob"), (0.0, 1.0))},
            "the bounds of 'judge'",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"protocol 'talk': {message}"):
        build(ASK, END, **fields)


EXPECTED: dict[str, tuple[list[str], list[float]]] = {
    "accept_reject": (["reject", "accept"], [-1, 1]),
    "accept_reject_neither": (["reject", "neither", "accept"], [-1, 0, 1]),
    "likert_scale_4": (["strongly disagree", "disagree", "agree", "strongly agree"], [-1, -0.5, 0.5, 1]),
    "likert_scale_5": (
        ["strongly disagree", "disagree", "neither agree nor disagree", "agree", "strongly agree"],
        [-1, -0.5, 0, 0.5, 1],
    ),
    "likert_scale_6": (
        ["strongly disagree", "disagree", "somewhat disagree", "somewhat agree", "agree", "strongly agree"],
        [-1, -0.667, -0.333, 0.333, 0.667, 1],
    ),
    "likert_scale_7": (
        [
            *("strongly disagree", "disagree", "somewhat disagree", "neither agree nor disagree"),
            *("somewhat agree", "agree", "strongly agree"),
        ],
        [-1, -0.667, -0.333, 0, 0.333, 0.667, 1],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_scales_of_words(name: str) -> None:
    texts, values = EXPECTED[name]
    assert list(SCALES[name].texts) == texts
    assert SCALES[name].values == pytest.approx(values, abs=5e-4)


@given(st.sampled_from(sorted(SCALES)), st.data())
def test_every_option_is_read_as_itself(name: str, data: st.DataObject) -> None:
    scale = SCALES[name]
    text, value = data.draw(st.sampled_from(scale.options))
    around = data.draw(st.sampled_from(["{}", " {} ", "**{}**", '"{}".', "{}, because of line 3", "{}\n"]))
    assert scale.read(around.format(text.upper())) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("accept_reject", "accept or reject?", None),
        ("accept_reject", "accept/reject", None),
        ("accept_reject", "acceptable", None),
        ("accept_reject", "I accept", None),
        ("accept_reject", "", None),
        ("out_of_10", "7/10", 0.4),
        ("out_of_10", "7 out of 10", 0.4),
        ("out_of_10", "7/100", None),
        ("out_of_10", "7.5", None),
        ("out_of_10", "7-8", None),
        ("out_of_10", "7 – 8", None),
        ("out_of_10", "8%", None),
        ("out_of_100", "80%", 0.6),
        ("out_of_10", "11", None),
        ("out_of_10", "-3", None),
        ("out_of_100", "10", -0.8),
        ("likert_scale_5", "agree", 0.5),
        ("likert_scale_5", "agree or disagree", None),
    ],
)
def test_reading_a_decision(name: str, text: str, value: float | None) -> None:
    assert SCALES[name].read(text) == (None if value is None else pytest.approx(value))


MAY = Turn("verifier", ("main",), "may")
MUST = Turn("verifier", (), "must")
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
        assert parse_answer(text, turn) == Move(decision=1.0)


@given(st.text(max_size=60))
def test_a_turn_that_may_not_decide_never_does(text: str) -> None:
    for said in (text, f"Decision: accept{text}", f"{text}\nDecision: reject"):
        act = parse_answer(said, Turn("prover", ("main",)))
        assert act == (Move({"main": said.strip()}) if said.strip() else Malformed("an empty answer"))


@given(st.text(max_size=60))
def test_a_turn_that_must_decide_never_speaks(text: str) -> None:
    act = parse_answer(text, MUST)
    assert isinstance(act, Malformed) or (act.decision is not None and not act.messages)


@pytest.mark.parametrize(
    ("text", "turn", "reason"),
    [
        ("Decision: maybe", MAY, "'maybe' is none of: reject | accept"),
        ("Decision:", MAY, "'' is none of: reject | accept"),
        ("Decision: 120", Turn("v", (), "must", SCALES["out_of_100"]), "'120' is none of: 0 … 100"),
        ("Decision: accept\nDecision: reject", MAY, ": accept, reject"),
        ("I cannot tell", MUST, "'Decision: reject | accept'"),
        ("", MUST, "'Decision: reject | accept'"),
        ("  \n", MAY, "an empty answer"),
        ("To Ann: hello", BOTH, "starts with 'To Bob:'"),
        ("To Ann:\nTo Bob: hello", BOTH, "nothing after 'To Ann:'"),
    ],
)
def test_what_cannot_be_used_says_why(text: str, turn: Turn, reason: str) -> None:
    found = parse_answer(text, turn)
    assert isinstance(found, Malformed) and reason in found.reason


def test_several_channels_have_a_part_each_in_any_order() -> None:
    expected = Move({"a": "hello\nthere", "b": "and you"})
    assert parse_answer("To Ann: hello\nthere\nTo Bob: and you", BOTH) == expected
    assert parse_answer("Well.\n**to bob:** and you\n**To Ann:**\nhello\nthere ", BOTH) == expected
