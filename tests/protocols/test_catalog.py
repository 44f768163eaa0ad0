"""Golden tables of the named protocols, written by hand: schedule and visibility."""

from __future__ import annotations

from typing import Any

import pytest

from etude.core.errors import RequestError
from etude.protocols import Protocol, adp, debate, merlin_arthur, mnip, nip

V_MAY = "verifier>main may"
V_MUST = "verifier> must"
P = "prover>main no"
W_MAY = "verifier>prover0_channel+prover1_channel may"
P0 = "prover0>prover0_channel no"
P1 = "prover1>prover1_channel no"

NIP = {True: [[V_MAY], [P], [V_MAY], [P], [V_MUST]], False: [[P], [V_MAY], [P], [V_MUST]]}
"""By `verifier_first`."""

TWO_PROVERS: dict[tuple[bool, bool, bool], list[list[str]]] = {
    # verifier_first, sequential, prover0_first
    (True, False, True): [[W_MAY], [P0, P1], [W_MAY], [P0, P1], [V_MUST]],
    (True, False, False): [[W_MAY], [P0, P1], [W_MAY], [P0, P1], [V_MUST]],
    (True, True, True): [[W_MAY], [P0], [P1], [W_MAY], [P0], [P1], [V_MUST]],
    (True, True, False): [[W_MAY], [P1], [P0], [W_MAY], [P1], [P0], [V_MUST]],
    (False, False, True): [[P0, P1], [W_MAY], [P0, P1], [V_MUST]],
    (False, False, False): [[P0, P1], [W_MAY], [P0, P1], [V_MUST]],
    (False, True, True): [[P0], [P1], [W_MAY], [P0], [P1], [V_MUST]],
    (False, True, False): [[P1], [P0], [W_MAY], [P1], [P0], [V_MUST]],
}


def list_schedule(protocol: Protocol, key: int = 0) -> list[list[str]]:
    return [
        [f"{turn.agent}>{'+'.join(turn.writes)} {turn.decide}" for turn in turns]
        for turns in protocol.rounds(key)
    ]


def list_readers(protocol: Protocol) -> dict[str, list[str]]:
    return {channel: sorted(readers) for channel, readers in protocol.channels.items()}


@pytest.mark.parametrize("randomized", [False, True])
@pytest.mark.parametrize("verifier_first", [True, False])
def test_nip(verifier_first: bool, randomized: bool) -> None:
    rounds = {True: 5, False: 4}[verifier_first]
    protocol = nip(
        max_message_rounds=rounds, verifier_first=verifier_first, randomize_prover_stance=randomized
    )
    assert list_schedule(protocol) == NIP[verifier_first]
    assert list_readers(protocol) == {"main": ["prover", "verifier"]}
    assert list(protocol.agents) == ["prover", "verifier"]
    assert protocol.agents["prover"].stance == ("example" if randomized else 1)


@pytest.mark.parametrize(
    ("make", "options", "stances", "heard"),
    [
        (debate, {}, [0, 1], ["prover0", "prover1"]),
        (mnip, {}, [1, 1], []),
        (mnip, {"randomize_prover_stance": True}, ["example"] * 2, []),
    ],
    ids=["debate", "mnip", "mnip of either side"],
)
@pytest.mark.parametrize("case", TWO_PROVERS)
def test_two_provers(
    case: tuple[bool, bool, bool], make: Any, options: dict[str, Any], stances: list[Any], heard: list[str]
) -> None:
    verifier_first, sequential, prover0_first = case
    protocol = make(
        max_message_rounds=len(TWO_PROVERS[case]),
        verifier_first=verifier_first,
        sequential=sequential,
        prover0_first=prover0_first,
        **options,
    )
    assert list_schedule(protocol) == TWO_PROVERS[case]
    assert list_readers(protocol) == {
        f"{prover}_channel": sorted({prover, *heard, "verifier"}) for prover in ("prover0", "prover1")
    }
    assert [role.stance for role in protocol.agents.values()] == [*stances, None]


def test_merlin_arthur() -> None:
    protocol = merlin_arthur()
    assert list_schedule(protocol, 0) == [["prover0>main no"], [V_MUST]]
    assert list_schedule(protocol, 1) == [["prover1>main no"], [V_MUST]]
    assert list_readers(protocol) == {"main": ["prover0", "prover1", "verifier"]}
    assert [protocol.agents[name].stance for name in ("prover0", "prover1", "verifier")] == [0, 1, None]
    assert [protocol.agents[name].anonymous for name in ("prover0", "prover1", "verifier")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("make", [nip, debate, mnip])
def test_before_the_fewest_rounds_the_verifier_asks_and_cannot_decide(make: Any) -> None:
    protocol = make(max_message_rounds=7, min_message_rounds=4)
    assert [turns[0].decide for turns in protocol.rounds(0)][::2] == ["no", "no", "may", "must"]
    assert protocol.max_rounds == 7


@pytest.mark.parametrize(
    ("make", "parameters", "rounds"),
    [
        (nip, {}, 9),
        (nip, {"verifier_first": False}, 8),
        (debate, {}, 9),
        (debate, {"verifier_first": False}, 8),
        (debate, {"sequential": True}, 10),
        (debate, {"sequential": True, "verifier_first": False}, 9),
        (mnip, {}, 9),
        (mnip, {"sequential": True}, 10),
        (mnip, {"sequential": True, "verifier_first": False}, 9),
    ],
)
def test_without_a_number_of_rounds_the_last_is_the_verifiers(
    make: Any, parameters: dict, rounds: int
) -> None:
    assert make(**parameters).max_rounds == rounds


@pytest.mark.parametrize(
    ("make", "parameters", "message"),
    [
        (nip, {"max_message_rounds": 8}, "8, the verifier must decide in the last round.*use 9"),
        (debate, {"max_message_rounds": 9, "sequential": True}, "use 10"),
        (nip, {"max_message_rounds": 5, "min_message_rounds": 6}, "between 1 and 5, found 6"),
        (nip, {"shard_reward": True}, "no parameter 'shard_reward'; did you mean 'shared_reward'"),
        (nip, {"prover_reward": float("nan")}, "prover_reward: Input should be a finite number"),
        (nip, {"force_guess": "y"}, "force_guess: Input should be 'accept', 'reject' or 'truth', found 'y'"),
        (adp, {"verifier_decision_spectrum": "likert_5"}, "did you mean 'likert_scale_5'"),
        (debate, {"randomize_prover_stance": True}, "debate has no parameter 'randomize_prover_stance'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(make: Any, parameters: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(**parameters)
