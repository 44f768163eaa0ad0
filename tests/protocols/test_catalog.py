"""Golden tables of the named protocols, written by hand: schedules, visibility, payoffs and bounds."""

from typing import Any

import pytest

from etude.core.errors import RequestError
from etude.protocols import (
    Outcome,
    Protocol,
    Role,
    Turn,
    adp,
    debate,
    merlin_arthur,
    mnip,
    nip,
    solo_verifier,
)
from etude.protocols.catalog import PROTOCOLS
from etude.store.journal import Journal
from tests.protocols.games import play_record, play_tree, script

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
    roles = [protocol.agents[name] for name in ("prover0", "prover1", "verifier")]
    assert [(role.stance, role.anonymous) for role in roles] == [(0, True), (1, True), (None, False)]


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
        (debate, {"sequential": True}, 10),
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
        (nip, {"max_message_rounds": 8}, "max_message_rounds.* 8, .*use 9"),
        (debate, {"max_message_rounds": 9, "sequential": True}, "use 10"),
        (nip, {"max_message_rounds": 5, "min_message_rounds": 6}, "between 1 and 5, found 6"),
        (nip, {"shard_reward": True}, "'shard_reward'.*'shared_reward'"),
        (nip, {"prover_reward": float("nan")}, "prover_reward: .*finite"),
        (nip, {"force_guess": "y"}, "force_guess: .*'accept', 'reject' or 'truth', found 'y'"),
        (adp, {"verifier_decision_spectrum": "likert_5"}, "'likert_5'.*'likert_scale_5'"),
        (debate, {"randomize_prover_stance": True}, "debate .*parameter 'randomize_prover_stance'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(make: Any, parameters: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(**parameters)


def payoffs(protocol: Protocol, *agents: str, **outcome: Any) -> tuple[float, ...]:
    """The agents' payoffs when the play ends so; by default all is right, and the verifier had the turn."""
    happened = {"truth": 1, "stance": 1, "over": True, "decider": "verifier", **outcome}
    earned = protocol.payoff(Outcome(**happened))
    return tuple(earned[agent] for agent in agents)


@pytest.mark.parametrize(
    ("decision", "default", "generous", "prover", "prover0"),
    [
        # verifier 2 / -4, so -1 for neither; the same with 0.5 for neither; provers of 3 for and against
        (1.0, 2.0, 2.0, 3.0, 0.0),
        (0.5, 0.5, 1.25, 2.25, 0.75),
        (0.0, -1.0, 0.5, 1.5, 1.5),
        (-0.5, -2.5, -1.75, 0.75, 2.25),
        (-1.0, -4.0, -4.0, 0.0, 3.0),
    ],
)
def test_payoffs_in_between_are_interpolated(
    decision: float, default: float, generous: float, prover: float, prover0: float
) -> None:
    terms = {
        "verifier_reward": 2.0,
        "verifier_incorrect_penalty": -4.0,
        "prover_reward": 3.0,
        "verifier_decision_spectrum": "likert_scale_5",
    }
    assert payoffs(nip(**terms), "verifier", "prover", decision=decision) == (default, prover)
    three = payoffs(debate(**terms), "verifier", "prover0", "prover1", decision=decision)
    assert three == (default, prover0, prover)
    kind = nip(**terms, verifier_neither_accept_nor_reject_reward=0.5)
    assert payoffs(kind, "verifier", "prover", decision=decision) == (generous, prover)
    assert payoffs(kind, "verifier", truth=0, decision=-decision) == (generous,)


@pytest.mark.parametrize("name", ["nip", "adp", "debate", "merlin_arthur", "mnip"])
def test_terms_that_all_protocols_share(name: str) -> None:
    make = PROTOCOLS[name]
    [prover, *_] = make().agents
    terms = {"verifier_terminated_penalty": -0.5, "verifier_no_guess_reward": 0.125}
    plain, shared = make(**terms), make(**terms, shared_reward=True)
    strict = make(prover_invalid_response_penalty=-2.0)
    invalid = frozenset({prover})
    assert payoffs(plain, "verifier", prover, decision=None) == (-0.5, 0.0)
    assert payoffs(plain, "verifier", prover, decision=None, over=False) == (0.125, 0.0)
    assert payoffs(plain, "verifier", prover, decision=None, over=False, decider=None) == (0.0, 0.0)
    assert payoffs(shared, "verifier", prover, decision=-1.0) == (-1.0, -1.0)
    assert payoffs(shared, "verifier", prover, decision=None) == (-0.5, -0.5)
    assert payoffs(strict, "verifier", prover, decision=None, decider=None, invalid=invalid) == (0.0, -2.0)
    unfinished = payoffs(plain, "verifier", prover, decision=None, decider=None, over=False, invalid=invalid)
    assert unfinished == (0.0, 0.0)
    assert strict.agents[prover].must_be_valid and not plain.agents[prover].must_be_valid


@pytest.mark.parametrize(
    ("protocol", "agent", "bounds"),
    [
        (nip(), "prover", (0.0, 1.0)),
        (nip(), "verifier", (-1.0, 1.0)),
        (nip(shared_reward=True), "prover", (-1.0, 1.0)),
        (nip(prover_invalid_response_penalty=-2.0), "prover", (-2.0, 1.0)),
        (nip(verifier_terminated_penalty=-5.0), "verifier", (-5.0, 1.0)),
        # Five turns of the verifier, of which four can go by: 4 x 0.5 at the most before the right verdict.
        (nip(verifier_no_guess_reward=0.5), "verifier", (-1.0, 3.0)),
        (debate(), "prover0", (0.0, 1.0)),
        (debate(prover_reward=4.0), "prover1", (0.0, 4.0)),
        (solo_verifier(verifier_neither_accept_nor_reject_reward=9.0), "verifier", (-1.0, 1.0)),
        (
            solo_verifier(
                verifier_neither_accept_nor_reject_reward=9.0, verifier_decision_spectrum="likert_scale_5"
            ),
            "verifier",
            (-1.0, 9.0),
        ),
    ],
)
def test_bounds_are_what_can_happen(protocol: Protocol, agent: str, bounds: tuple[float, float]) -> None:
    assert protocol.bounds[agent] == bounds


def one_speaker(payoff, **fields) -> Protocol:
    return Protocol(
        name="codec",
        agents={"ann": Role("speaker")},
        channels={"hall": frozenset({"ann"})},
        schedules=(((Turn("ann", ("hall",)),),),),
        payoff=payoff,
        needs_verdict=False,
        bounds={"ann": (0.0, 1.0)},
        **fields,
    )


async def test_a_play_without_a_verdict_is_paid_by_what_was_said(journal: Journal) -> None:
    protocol = one_speaker(lambda outcome: {"ann": len(outcome.log[-1].text) / 10})
    tree = await play_tree(protocol, script(ann=["seven"]), journal)
    assert tree.value(None, "ann") == 0.5
    [leaf] = tree.leaves()
    assert (leaf.ending, leaf.verdict) == ("undecided", None)


async def test_a_play_that_earns_more_than_its_bounds_fails_and_says_so(journal: Journal) -> None:
    protocol = one_speaker(lambda outcome: {"ann": float(len(outcome.log[-1].messages["hall"]))})
    record = await play_record(protocol, script(ann=["seven"]), journal)
    assert "'ann' earned 5 " in record.failure.reason and "bounds 0 to 1" in record.failure.reason


@pytest.mark.parametrize("earned", [{"ann": float("nan")}, {"ann": "much"}, {"eve": 1.0}, None, 3])
async def test_what_is_no_payoff_fails_the_episode(journal: Journal, earned) -> None:
    def pay(outcome: Outcome):
        return earned if outcome.log[-1].text == "go" else {}

    record = await play_record(one_speaker(pay), script(ann=["go"]), journal)
    assert record.failure.reason.startswith("EpisodeError: protocol 'codec': in round 0, ")
