"""The named protocols, as plain functions of their parameters, and their payoffs."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from etude.core.data_model import list_faults
from etude.core.errors import RequestError, alternatives
from etude.protocols.protocol import SCALES, Outcome, Protocol, Role, Round, Scale, Stance, Turn
from etude.protocols.tree import ACCEPT, REJECT, VERDICTS, sign

VERIFIER = "verifier"

Cycle: TypeAlias = tuple[tuple[str, ...], ...]
"""The agents of each round, repeated until the play ends. Agents of one round speak at the same time."""

_LEAST_ROUNDS = 8
"""The default number of rounds, which grows by one or two if the verifier's turn is later."""

_LABELS = {VERIFIER: "Verifier", "prover": "Expert", "prover0": "Expert_1", "prover1": "Expert_2"}


class Terms(BaseModel, frozen=True, strict=True, allow_inf_nan=False):
    """The parameters that the named protocols share: rewards, penalties and the scale of decisions."""

    verifier_reward: float = 1.0
    """The verifier's reward for the right verdict."""
    verifier_incorrect_penalty: float = -1.0
    """The verifier's reward for the wrong verdict."""
    verifier_terminated_penalty: float = -1.0
    """The verifier's reward when the rounds run out without a decision."""
    verifier_no_guess_reward: float = 0.0
    """The verifier's reward for each turn without a decision, except the last."""
    verifier_neither_accept_nor_reject_reward: float | None = None
    """The verifier's reward for the decision `neither`. Default: half-way between right and wrong verdict."""
    verifier_decision_spectrum: str = "accept_reject"
    """The scale of decisions, by its name in `SCALES`."""
    force_guess: Literal["accept", "reject", "truth"] | None = None
    """A verdict that replaces every decision of the verifier, and a missing decision in the last turn."""
    prover_reward: float = 1.0
    """A prover's reward for a decision fully on its side. Decisions in between pay in proportion."""
    shared_reward: bool = False
    """Set this to pay provers the verifier's reward."""
    prover_invalid_response_penalty: float | None = None
    """A prover's reward when its answer stays malformed, which ends the play. Default: the play continues."""

    @property
    def neither_reward(self) -> float:
        """The verifier's reward for the decision `neither`."""
        reward = self.verifier_neither_accept_nor_reject_reward
        return (self.verifier_reward + self.verifier_incorrect_penalty) / 2 if reward is None else reward


_PROVER_TERMS = ("prover_reward", "shared_reward", "prover_invalid_response_penalty")


@dataclass(frozen=True, slots=True)
class ProofPayoff:
    """The payoff of the verifier for the right verdict, and of provers for verdicts on their side."""

    terms: Terms
    stances: Mapping[str, Stance]
    """The stance of each prover."""

    def __call__(self, outcome: Outcome) -> Mapping[str, float]:
        """Return the rewards of all agents for a round."""
        terms, decision = self.terms, outcome.decision
        if decision is not None:
            rightness = decision * sign(outcome.truth)
            extreme = terms.verifier_reward if rightness > 0 else terms.verifier_incorrect_penalty
            verifier = terms.neither_reward + abs(rightness) * (extreme - terms.neither_reward)
        elif outcome.decider != VERIFIER:
            verifier = 0.0
        else:
            verifier = terms.verifier_terminated_penalty if outcome.over else terms.verifier_no_guess_reward
        earned = {VERIFIER: verifier}
        for prover, stance in self.stances.items():
            side = sign(outcome.stance if stance == "example" else stance)
            earned[prover] = 0.0 if decision is None else terms.prover_reward * (1 + decision * side) / 2
            if terms.shared_reward:
                earned[prover] = verifier
            if terms.prover_invalid_response_penalty is not None and prover in outcome.invalid:
                earned[prover] = terms.prover_invalid_response_penalty
        return earned


def nip(
    *,
    max_message_rounds: int | None = None,
    min_message_rounds: int = 1,
    verifier_first: bool = True,
    randomize_prover_stance: bool = False,
    **terms: Any,
) -> Protocol:
    """A prover and a verifier take turns (neural interactive proofs; Hammond and Adam-Day, 2024).

    The verifier may decide from round `min_message_rounds` on, counted from 1, and must in the last. By
    default there are 8 rounds, or the next number that ends with the verifier. The prover argues for accept.
    With `randomize_prover_stance` it argues for the scenario's stance on each example, or a drawn one.
    `terms` are the fields of `Terms`. Raises RequestError for unknown terms, and if the verifier is not last.
    """
    return _proof(
        nip,
        terms,
        {"prover": ("main", _stance(randomize_prover_stance))},
        [_cycle((("prover",),), verifier_first)],
        max_message_rounds,
        min_message_rounds,
    )


def adp(*, randomize_prover_stance: bool = False, **terms: Any) -> Protocol:
    """The prover speaks once, then the verifier decides (abstract decision problem; Anil et al., 2021).

    The parameters and errors are the same as for `nip`.
    """
    prover = ("main", _stance(randomize_prover_stance))
    return _proof(adp, terms, {"prover": prover}, [(("prover",), (VERIFIER,))], max_rounds=2)


def debate(
    *,
    max_message_rounds: int | None = None,
    min_message_rounds: int = 1,
    verifier_first: bool = True,
    sequential: bool = False,
    prover0_first: bool = True,
    randomize_channel_order: bool = True,
    **terms: Any,
) -> Protocol:
    """Two provers argue against each other in public (Irving et al., 2018).

    `prover0` argues for reject and `prover1` for accept, each on a separate channel. The verifier writes
    on both. The provers speak at the same time, or one after the other when `sequential`. With
    `randomize_channel_order`, agents read the channels of each round in a random order. The other
    parameters and the errors are the same as for `nip`.
    """
    return _proof(
        debate,
        terms,
        {"prover0": ("prover0_channel", REJECT), "prover1": ("prover1_channel", ACCEPT)},
        [_cycle(_two_provers(sequential, prover0_first), verifier_first)],
        max_message_rounds,
        min_message_rounds,
        public=True,
        shuffle_channels=randomize_channel_order,
    )


def mnip(
    *,
    max_message_rounds: int | None = None,
    min_message_rounds: int = 1,
    verifier_first: bool = True,
    sequential: bool = False,
    prover0_first: bool = True,
    randomize_channel_order: bool = True,
    randomize_prover_stance: bool = False,
    **terms: Any,
) -> Protocol:
    """Two provers that cannot hear each other, for the same verdict (multi-prover; Ben-Or et al., 1988).

    It works as `debate`, but each prover reads only its own channel. Both argue for accept, or with
    `randomize_prover_stance` for the scenario's stance on each example.
    """
    stance = _stance(randomize_prover_stance)
    return _proof(
        mnip,
        terms,
        {"prover0": ("prover0_channel", stance), "prover1": ("prover1_channel", stance)},
        [_cycle(_two_provers(sequential, prover0_first), verifier_first)],
        max_message_rounds,
        min_message_rounds,
        shuffle_channels=randomize_channel_order,
    )


def merlin_arthur(**terms: Any) -> Protocol:
    """One of two provers speaks once, and the verifier does not learn which (Wäldchen et al., 2022).

    `prover0` argues for reject and `prover1` for accept. Each play draws one of them. The terms and errors
    are the same as for `nip`.
    """
    return _proof(
        merlin_arthur,
        terms,
        {"prover0": ("main", REJECT), "prover1": ("main", ACCEPT)},
        [(("prover0",), (VERIFIER,)), (("prover1",), (VERIFIER,))],
        max_rounds=2,
        public=True,
        anonymous=True,
    )


def solo_verifier(**terms: Any) -> Protocol:
    """The verifier decides alone: the baseline for the other protocols."""
    return _proof(solo_verifier, terms, {}, [((VERIFIER,),)], max_rounds=1)


PROTOCOLS: Mapping[str, Callable[..., Protocol]] = MappingProxyType(
    {function.__name__: function for function in (nip, adp, debate, merlin_arthur, mnip, solo_verifier)}
)
"""The named protocols."""


def _stance(randomized: bool) -> Stance:
    return "example" if randomized else ACCEPT


def _cycle(provers: Cycle, verifier_first: bool) -> Cycle:
    verifier: Cycle = ((VERIFIER,),)
    return verifier + provers if verifier_first else provers + verifier


def _two_provers(sequential: bool, prover0_first: bool) -> Cycle:
    if not sequential:
        return (("prover0", "prover1"),)
    return (("prover0",), ("prover1",)) if prover0_first else (("prover1",), ("prover0",))


def _proof(
    make: Callable[..., Protocol],
    given: Mapping[str, Any],
    provers: Mapping[str, tuple[str, Stance]],
    cycles: Sequence[Cycle],
    max_rounds: int | None = None,
    min_rounds: int = 1,
    *,
    public: bool = False,
    anonymous: bool = False,
    shuffle_channels: bool = False,
) -> Protocol:
    """Build the protocol that `make` names, of one verifier and provers, each with its channel and stance.

    Provers read the channel that they write on, or all channels if they are `public`. The verifier writes on
    all channels. Raises RequestError for rounds and terms that do not fit.
    """
    name, terms = make.__name__, _to_terms(make, given, has_provers=bool(provers))
    scale = SCALES[terms.verifier_decision_spectrum]
    channels = tuple(dict.fromkeys(channel for channel, _ in provers.values()))
    headers = tuple(f"Question for {_LABELS[prover]}:" for prover in provers) if len(channels) > 1 else ()

    def schedule(cycle: Cycle) -> tuple[Round, ...]:
        count = _round_count(name, max_rounds, min_rounds, cycle)

        def turn(agent: str, number: int) -> Turn:
            if agent != VERIFIER:
                return Turn(agent, (provers[agent][0],), scale=scale)
            if number == count:
                return Turn(agent, (), "must", scale)
            return Turn(agent, channels, "may" if number >= min_rounds else "no", scale, headers)

        agents = islice(itertools.cycle(cycle), count)
        return tuple(tuple(turn(agent, number) for agent in each) for number, each in enumerate(agents, 1))

    strict = terms.prover_invalid_response_penalty is not None
    readers = {
        channel: [prover for prover in provers if public or provers[prover][0] == channel]
        for channel in channels
    }
    schedules = tuple(map(schedule, cycles))
    passing = max(sum(turns[0].agent == VERIFIER for turns in rounds) for rounds in schedules) - 1
    payoff = ProofPayoff(terms, {prover: stance for prover, (_, stance) in provers.items()})
    return Protocol(
        name=name,
        agents={
            prover: Role("prover", False, stance, _LABELS[prover], anonymous, must_be_valid=strict)
            for prover, (_, stance) in provers.items()
        }
        | {VERIFIER: Role("verifier", may_decide=True, label=_LABELS[VERIFIER])},
        channels={channel: frozenset({VERIFIER, *names}) for channel, names in readers.items()},
        schedules=schedules,
        payoff=payoff,
        bounds=_bounds(payoff, scale, passing),
        shuffle_channels=shuffle_channels,
        forced=terms.force_guess,
    )


def _to_terms(make: Callable[..., Protocol], given: Mapping[str, Any], *, has_provers: bool) -> Terms:
    name = make.__name__
    known = [key for key in Terms.model_fields if has_provers or key not in _PROVER_TERMS]
    for key in given:
        if key not in known:
            known += [*inspect.signature(make).parameters][:-1]
            raise RequestError(f"{name} has no parameter '{key}'" + alternatives(key, known))
    try:
        terms = Terms(**given)
    except ValidationError as error:
        raise RequestError(f"{name}: {list_faults(error)}") from error
    if (scale := terms.verifier_decision_spectrum) not in SCALES:
        raise RequestError(f"there is no decision scale '{scale}'" + alternatives(scale, SCALES))
    return terms


def _bounds(payoff: ProofPayoff, scale: Scale, passing: int) -> dict[str, tuple[float, float]]:
    """Return bounds of each agent's total reward: of the last round, and of up to `passing` turns before."""
    ends = [
        Outcome(truth, stance, over=True, decider=VERIFIER, decision=decision)
        for truth, stance, decision in product(VERDICTS, VERDICTS, (*scale.values, None))
    ]
    if payoff.terms.prover_invalid_response_penalty is not None:
        ends += [Outcome(ACCEPT, ACCEPT, over=True, invalid=frozenset({each})) for each in payoff.stances]
    last = [payoff(end) for end in ends]
    passed = payoff(Outcome(ACCEPT, ACCEPT, over=False, decider=VERIFIER))
    return {
        agent: (
            min(earned[agent] for earned in last) + min(0.0, passing * each),
            max(earned[agent] for earned in last) + max(0.0, passing * each),
        )
        for agent, each in passed.items()
    }


def _round_count(name: str, max_rounds: int | None, min_rounds: int, cycle: Cycle) -> int:
    """Return the number of rounds. Raises RequestError if the last round is not the verifier's."""
    least = max(1, _LEAST_ROUNDS if max_rounds is None else max_rounds)
    count = next(each for each in itertools.count(least) if cycle[(each - 1) % len(cycle)] == (VERIFIER,))
    if max_rounds not in (None, count):
        raise RequestError(
            f"{name}: with max_message_rounds {max_rounds}, the verifier must decide in the last round, but "
            f"does not speak in it; use {count}"
        )
    if not 1 <= min_rounds <= count:
        raise RequestError(f"{name}: min_message_rounds must lie between 1 and {count}, found {min_rounds}")
    return count
