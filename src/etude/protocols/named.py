"""The named protocols, as plain functions of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Unpack

from etude.protocols.decision import ACCEPT, REJECT, scale_named
from etude.protocols.payoffs import ProofPayoff, ProofTerms, Terms, VerifierTerms, terms_of
from etude.protocols.protocol import Protocol
from etude.protocols.schedules import VERIFIER, Cycle, cycle_of, prover_rounds, round_count, schedule
from etude.protocols.turn import Role, Stance

_OWN_CHANNELS = {"prover0": "prover0_channel", "prover1": "prover1_channel"}
_ONE_CHANNEL = {"prover0": "main", "prover1": "main"}
_OPPOSED: dict[str, Stance] = {"prover0": REJECT, "prover1": ACCEPT}
_LABELS = {VERIFIER: "Verifier", "prover": "Expert", "prover0": "Expert_1", "prover1": "Expert_2"}


def nip(
    *,
    max_message_rounds: int | None = None,
    min_message_rounds: int = 1,
    verifier_first: bool = True,
    randomize_prover_stance: bool = False,
    **terms: Unpack[ProofTerms],
) -> Protocol:
    """A prover and a verifier take turns (neural interactive proofs; Hammond and Adam-Day, 2024).

    The verifier may decide from round `min_message_rounds` on, counted from 1, and must in the last; the
    default is the first number of rounds from 8 on that ends with it. The prover argues for accept, or
    with `randomize_prover_stance` for what the scenario says of each example; where it says nothing, a
    side is drawn for each play. `terms` are those of `Terms`. Raises RequestError for rounds that do not
    end with the verifier, and for unknown terms.
    """
    return _proof(
        "nip",
        terms_of(nip, terms, ProofTerms),
        {"prover": _stance(randomize_prover_stance)},
        {"prover": "main"},
        [cycle_of((("prover",),), verifier_first)],
        max_message_rounds,
        min_message_rounds,
    )


def adp(*, randomize_prover_stance: bool = False, **terms: Unpack[ProofTerms]) -> Protocol:
    """The prover speaks once, then the verifier decides (abstract decision problem; Anil et al., 2021).

    For the parameters and what is raised see `nip`.
    """
    return _proof(
        "adp",
        terms_of(adp, terms, ProofTerms),
        {"prover": _stance(randomize_prover_stance)},
        {"prover": "main"},
        [cycle_of((("prover",),), verifier_first=False)],
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
    **terms: Unpack[ProofTerms],
) -> Protocol:
    """Two provers argue against each other before all ears (Irving et al., 2018).

    `prover0` argues for reject and `prover1` for accept, each on a channel of its own; the verifier
    writes on both. The provers speak at the same time, or one after the other when `sequential`. With
    `randomize_channel_order` each round's channels are read in an order of its own. For the other
    parameters and what is raised see `nip`.
    """
    return _proof(
        "debate",
        terms_of(debate, terms, ProofTerms),
        _OPPOSED,
        _OWN_CHANNELS,
        [cycle_of(prover_rounds(sequential, prover0_first), verifier_first)],
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
    **terms: Unpack[ProofTerms],
) -> Protocol:
    """Two provers that cannot hear each other, for the same verdict (multi-prover; Ben-Or et al., 1988).

    As `debate`, but a prover reads its own channel only, and both argue for accept, or with
    `randomize_prover_stance` for what the scenario says of each example.
    """
    return _proof(
        "mnip",
        terms_of(mnip, terms, ProofTerms),
        dict.fromkeys(_OWN_CHANNELS, _stance(randomize_prover_stance)),
        _OWN_CHANNELS,
        [cycle_of(prover_rounds(sequential, prover0_first), verifier_first)],
        max_message_rounds,
        min_message_rounds,
        shuffle_channels=randomize_channel_order,
    )


def merlin_arthur(**terms: Unpack[ProofTerms]) -> Protocol:
    """One of two provers speaks once, and the verifier is not told which (Wäldchen et al., 2022).

    `prover0` argues for reject and `prover1` for accept; each play draws one of them. For the parameters
    and what is raised see `nip`.
    """
    return _proof(
        "merlin_arthur",
        terms_of(merlin_arthur, terms, ProofTerms),
        _OPPOSED,
        _ONE_CHANNEL,
        [((prover,), (VERIFIER,)) for prover in _OPPOSED],
        max_rounds=2,
        public=True,
        anonymous=True,
    )


def solo_verifier(**terms: Unpack[VerifierTerms]) -> Protocol:
    """The verifier decides alone: what the other protocols are measured against."""
    given = terms_of(solo_verifier, terms, VerifierTerms)
    return _proof("solo_verifier", given, {}, {}, [((VERIFIER,),)], max_rounds=1)


PROTOCOLS: Mapping[str, Callable[..., Protocol]] = MappingProxyType(
    {function.__name__: function for function in (nip, adp, debate, merlin_arthur, mnip, solo_verifier)}
)
"""The named protocols."""


def _stance(randomized: bool) -> Stance:
    return "example" if randomized else ACCEPT


def _proof(
    name: str,
    terms: Terms,
    stances: Mapping[str, Stance],
    channels: Mapping[str, str],
    cycles: list[Cycle],
    max_rounds: int | None = None,
    min_rounds: int = 1,
    *,
    public: bool = False,
    anonymous: bool = False,
    shuffle_channels: bool = False,
) -> Protocol:
    """A protocol of one verifier and the provers of `stances`, each writing on its one of `channels`.

    Provers read the channel that they write on; all channels when they are `public`.
    """
    scale = scale_named(terms.verifier_decision_spectrum)
    strict = terms.prover_invalid_response_penalty is not None
    provers = {
        prover: Role("prover", False, stance, _LABELS[prover], anonymous, must_be_valid=strict)
        for prover, stance in stances.items()
    }
    several = len(set(channels.values())) > 1
    headers = {channel: f"Question for {_LABELS[prover]}:" for prover, channel in channels.items()}
    return Protocol(
        name=name,
        agents=provers | {VERIFIER: Role("verifier", may_decide=True, label=_LABELS[VERIFIER])},
        channels={
            channel: frozenset(
                {VERIFIER, *(prover for prover in stances if public or channels[prover] == channel)}
            )
            for channel in channels.values()
        },
        schedules=tuple(
            schedule(
                name,
                cycle,
                round_count(name, max_rounds, cycle),
                min_rounds,
                channels,
                scale,
                headers if several else {},
            )
            for cycle in cycles
        ),
        payoff=ProofPayoff(terms, VERIFIER, tuple(stances.items())),
        shuffle_channels=shuffle_channels,
        forced=terms.force_guess,
    )
