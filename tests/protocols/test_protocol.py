"""A protocol cannot be built wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from etude.core.errors import RequestError
from etude.protocols import Outcome, Protocol, Role, Turn

ROLES = {"judge": Role("verifier", may_decide=True), "ann": Role("prover"), "bob": Role("prover")}
HALL = {"hall": frozenset({"judge", "ann", "bob"}), "desk": frozenset({"judge", "ann"})}
ASK = (Turn("ann", ("hall",)),)
END = (Turn("judge", decide="must"),)


def pay(outcome: Outcome) -> dict[str, float]:
    """One for whoever hears `accept`, and a little for each idle turn."""
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
        (
            [(Turn("ann", ("hall",)), Turn("bob", ("hall",))), END],
            "'ann' and 'bob' both write on channel 'hall' in round 0",
        ),
        ([(Turn("bob", ("desk",)),), END], "'bob' writes on channel 'desk' in round 0, and cannot read it"),
        ([(Turn("ann", ("hall",), "must"),)], "'ann' must decide in round 0, and its role may not"),
        (
            [ASK],
            r"the last round \(0\) is a turn of 'ann' that need not decide; .* or say `needs_verdict=False`",
        ),
        ([END, END], "nothing can follow round 0, which must decide"),
        ([(Turn("ann", ("hall",)), Turn("ann", ("desk",))), END], "'ann' has two turns in round 0"),
        ([(Turn("ann"),), END], "'ann' neither writes nor decides in round 0"),
        (
            [(Turn("anne", ("hall",)),), END],
            "round 0 is a turn of 'anne', which is not there; did you mean 'ann'",
        ),
        ([(), END], "round 0 has no turns"),
    ],
)
def test_schedules_that_cannot_be_played_are_refused(rounds: list, message: str) -> None:
    with pytest.raises(RequestError, match=f"protocol 'talk': {message}"):
        build(*rounds)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"channels": {"hall": frozenset({"eve"})}}, "channel 'hall' is read by 'eve', which is not there"),
        (
            {
                "agents": ROLES | {"ann": Role("prover", may_decide=True), "bob": Role("prover")},
                "schedules": (((Turn("ann", ("hall",)), *END),),),
            },
            "ann and judge may both decide in round 0",
        ),
        ({"agents": ROLES | {"bob": Role("prover", stance="drawn")}}, "the stance of 'bob' is 'drawn'"),  # type: ignore[arg-type]
        ({"forced": "perhaps"}, "a forced decision is accept, reject or truth, not 'perhaps'"),
        ({"bounds": {"judge": (-1.0, 1.0)}}, "'ann' has no bounds; give them for all agents or for none"),
        (
            {"bounds": {"judge": (1.0, -1.0)} | dict.fromkeys(("ann", "bob"), (0.0, 1.0))},
            "the bounds of 'judge'",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"protocol 'talk': {message}"):
        build(ASK, END, **fields)
