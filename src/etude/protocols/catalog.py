"""The named protocols, as plain functions of their parameters, and their payoffs."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from etude.core.errors import RequestError, alternatives
from etude.protocols.protocol import Outcome, Protocol, Role, Round, Stance, Turn, find_scale
from etude.protocols.tree import ACCEPT, REJECT, VERDICTS, sign

VERIFIER = "verifier"

Cycle: TypeAlias = tuple[tuple[str, ...], ...]
"""The agents of each round, repeated until the play ends. Agents of one round speak at the same time."""

_LEAST_ROUNDS = 8
"""The default number of rounds, which grows by one or two if the verifier's turn is later."""

_OWN_CHANNELS = {"prover0": "prover0_channel", "prover1": "prover1_channel"}
_OPPOSED: dict[str, Stance] = {"prover0": REJECT, "prover1": ACCEPT}
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


def _to_terms(protocol: Callable[..., Any], values: Mapping[str, Any], *, has_provers: bool = True) -> Terms:
    """Build the terms of the named protocol that the function `protocol` makes, from the given values.

    Raises RequestError for unknown names and invalid values.
    """
    allowed = [name for name in Terms.model_fields if has_provers or name not in _PROVER_TERMS]
    for name in values:
        if name not in allowed:
            known = [*inspect.signature(protocol).parameters][:-1] + allowed
            raise RequestError(f"{protocol.__name__} has no parameter '{name}'" + alternatives(name, known))
    try:
        return Terms(**values)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise RequestError(
            f"{protocol.__name__}: {wrong['loc'][0]}: {wrong['msg']}, found {wrong['input']!r}"
        ) from error


@dataclass(frozen=True, slots=True)
class ProofPayoff:
    """The payoff of the verifier for the right verdict, and of provers for verdicts on their side."""

    terms: Terms
    stances: Mapping[str, Stance]
    """The stance of each prover."""

    def __call__(self, outcome: Outcome) -> Mapping[str, float]:
        """Return the rewards of all agents for a round."""
        verifier = self._verifier_payoff(outcome)
        provers = {prover: self._prover_payoff(prover, outcome, verifier) for prover in self.stances}
        return {VERIFIER: verifier, **provers}

    def _verifier_payoff(self, outcome: Outcome) -> float:
        terms = self.terms
        if outcome.decision is not None:
            rightness = outcome.decision * sign(outcome.truth)
            extreme = terms.verifier_reward if rightness > 0 else terms.verifier_incorrect_penalty
            return terms.neither_reward + abs(rightness) * (extreme - terms.neither_reward)
        if outcome.decider != VERIFIER:
            return 0.0
        return terms.verifier_terminated_penalty if outcome.over else terms.verifier_no_guess_reward

    def _prover_payoff(self, prover: str, outcome: Outcome, of_verifier: float) -> float:
        terms = self.terms
        if terms.prover_invalid_response_penalty is not None and prover in outcome.invalid:
            return terms.prover_invalid_response_penalty
        if terms.shared_reward:
            return of_verifier
        if outcome.decision is None:
            return 0.0
        own = self.stances[prover]
        side = outcome.stance if own == "example" else own
        return terms.prover_reward * (1 + outcome.decision * sign(side)) / 2


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
    `terms` are the fields of `Terms`. Raises RequestError for rounds that do not end with the verifier, and
    for unknown terms.
    """
    return _proof(
        "nip",
        _to_terms(nip, terms),
        {"prover": _stance(randomize_prover_stance)},
        {"prover": "main"},
        [_cycle((("prover",),), verifier_first)],
        max_message_rounds,
        min_message_rounds,
    )


def adp(*, randomize_prover_stance: bool = False, **terms: Any) -> Protocol:
    """The prover speaks once, then the verifier decides (abstract decision problem; Anil et al., 2021).

    The parameters and errors are the same as for `nip`.
    """
    return _proof(
        "adp",
        _to_terms(adp, terms),
        {"prover": _stance(randomize_prover_stance)},
        {"prover": "main"},
        [_cycle((("prover",),), verifier_first=False)],
        max_rounds=2,
    )


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
        "debate",
        _to_terms(debate, terms),
        _OPPOSED,
        _OWN_CHANNELS,
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
    return _proof(
        "mnip",
        _to_terms(mnip, terms),
        dict.fromkeys(_OWN_CHANNELS, _stance(randomize_prover_stance)),
        _OWN_CHANNELS,
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
        "merlin_arthur",
        _to_terms(merlin_arthur, terms),
        _OPPOSED,
        dict.fromkeys(_OPPOSED, "main"),
        [((prover,), (VERIFIER,)) for prover in _OPPOSED],
        max_rounds=2,
        public=True,
        anonymous=True,
    )


def solo_verifier(**terms: Any) -> Protocol:
    """The verifier decides alone: the baseline for the other protocols."""
    own_terms = _to_terms(solo_verifier, terms, has_provers=False)
    return _proof("solo_verifier", own_terms, {}, {}, [((VERIFIER,),)], max_rounds=1)


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
    name: str,
    terms: Terms,
    stances: Mapping[str, Stance],
    channels: Mapping[str, str],
    cycles: Sequence[Cycle],
    max_rounds: int | None = None,
    min_rounds: int = 1,
    *,
    public: bool = False,
    anonymous: bool = False,
    shuffle_channels: bool = False,
) -> Protocol:
    """Build a protocol of one verifier and the provers in `stances`. `channels` maps provers to channels.

    Provers read the channel that they write on, or all channels if they are `public`. The verifier writes on
    all channels, under one header each if there are several. It may decide from round `min_rounds` on,
    counted from 1, and must in the last. Raises RequestError for rounds that do not fit.
    """
    scale = find_scale(terms.verifier_decision_spectrum)
    everywhere = tuple(dict.fromkeys(channels.values()))
    headers = tuple(f"Question for {_LABELS[prover]}:" for prover in channels) if len(everywhere) > 1 else ()

    def schedule(cycle: Cycle) -> tuple[Round, ...]:
        count = _round_count(name, max_rounds, min_rounds, cycle)

        def turn(agent: str, number: int) -> Turn:
            if agent != VERIFIER:
                return Turn(agent, (channels[agent],), scale=scale)
            if number == count:
                return Turn(agent, (), "must", scale)
            return Turn(agent, everywhere, "may" if number >= min_rounds else "no", scale, headers)

        return tuple(
            tuple(turn(agent, number) for agent in cycle[(number - 1) % len(cycle)])
            for number in range(1, count + 1)
        )

    strict = terms.prover_invalid_response_penalty is not None
    provers = {
        prover: Role("prover", False, stance, _LABELS[prover], anonymous, must_be_valid=strict)
        for prover, stance in stances.items()
    }
    readers = {
        channel: [prover for prover in stances if public or channels[prover] == channel]
        for channel in everywhere
    }
    schedules, payoff = tuple(map(schedule, cycles)), ProofPayoff(terms, stances)
    return Protocol(
        name=name,
        agents=provers | {VERIFIER: Role("verifier", may_decide=True, label=_LABELS[VERIFIER])},
        channels={channel: frozenset({VERIFIER, *names}) for channel, names in readers.items()},
        schedules=schedules,
        payoff=payoff,
        bounds=_bounds(payoff, schedules),
        shuffle_channels=shuffle_channels,
        forced=terms.force_guess,
    )


def _bounds(payoff: ProofPayoff, schedules: Sequence[Sequence[Round]]) -> dict[str, tuple[float, float]]:
    """Return each agent's lowest and highest total reward, over all possible endings of a play."""
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for rounds, truth, stance in product(schedules, VERDICTS, VERDICTS):
        known = Outcome(truth, stance, over=False)
        so_far: Mapping[str, float] = dict.fromkeys((VERIFIER, *payoff.stances), 0.0)
        for number, turns in enumerate(rounds, 1):
            decider = VERIFIER if turns[0].agent == VERIFIER else None
            now = replace(known, decider=decider)
            for end in _endings(payoff.terms, replace(now, over=True), turns, last=number == len(rounds)):
                for agent, earned in payoff(end).items():
                    totals[agent].append(so_far[agent] + earned)
            so_far = {agent: so_far[agent] + earned for agent, earned in payoff(now).items()}
    return {agent: (min(values), max(values)) for agent, values in totals.items()}


def _endings(terms: Terms, end: Outcome, turns: Round, *, last: bool) -> Iterator[Outcome]:
    """Yield the outcomes with which a play can end in a round."""
    if end.decider is None:
        if terms.prover_invalid_response_penalty is not None:
            yield from (replace(end, invalid=frozenset({turn.agent})) for turn in turns)
    elif turns[0].decide != "no":
        forced = {"accept": ACCEPT, "reject": REJECT, "truth": end.truth}
        if terms.force_guess is not None:
            yield replace(end, decision=float(sign(forced[terms.force_guess])))
            return
        yield from (replace(end, decision=value) for value in turns[0].scale.values)
        if last:
            yield end


def _round_count(protocol: str, max_rounds: int | None, min_rounds: int, cycle: Cycle) -> int:
    """Return the number of rounds.

    Raises RequestError if the last round is not the verifier's, or if `min_rounds` is out of range.
    """
    most = max(max_rounds or 0, _LEAST_ROUNDS) + len(cycle)
    good = [count for count in range(1, most + 1) if cycle[(count - 1) % len(cycle)] == (VERIFIER,)]
    count = next(count for count in good if count >= _LEAST_ROUNDS) if max_rounds is None else max_rounds
    if count not in good:
        near = [str(each) for each in good if abs(each - max(count, 0)) <= len(cycle)]
        raise RequestError(
            f"{protocol}: with max_message_rounds {count}, the verifier must decide in the last round, but "
            f"does not speak in it; use {' or '.join(near)}"
        )
    if not 1 <= min_rounds <= count:
        raise RequestError(
            f"{protocol}: min_message_rounds must lie between 1 and {count}, found {min_rounds}"
        )
    return count
