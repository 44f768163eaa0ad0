"""Schedules of the named protocols: who speaks in which round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from etude.core.errors import RequestError
from etude.protocols.decision import Scale
from etude.protocols.turn import Decides, Round, Turn

VERIFIER = "verifier"

Cycle: TypeAlias = tuple[tuple[str, ...], ...]
"""The agents of each round, over and over: those within a round speak at the same time."""

_LEAST_ROUNDS = 8
"""Rounds of a protocol that is not given a number, and one or two more to end with the verifier."""


def cycle_of(provers: Cycle, verifier_first: bool) -> Cycle:
    """The rounds of the provers with one of the verifier, before or after them."""
    verifier: Cycle = ((VERIFIER,),)
    return verifier + provers if verifier_first else provers + verifier


def prover_rounds(sequential: bool, prover0_first: bool) -> Cycle:
    """Two provers in one round, or one after the other."""
    if not sequential:
        return (("prover0", "prover1"),)
    return (("prover0",), ("prover1",)) if prover0_first else (("prover1",), ("prover0",))


def round_count(protocol: str, given: int | None, cycle: Cycle) -> int:
    """The number of rounds. Raises RequestError for a number whose last round is not the verifier's."""

    def ends_well(count: int) -> bool:
        return cycle[(count - 1) % len(cycle)] == (VERIFIER,)

    if given is None:
        return next(count for count in range(_LEAST_ROUNDS, _LEAST_ROUNDS + len(cycle)) if ends_well(count))
    near = range(max(given - len(cycle), 0) + 1, max(given, 0) + len(cycle) + 1)
    if given not in near or not ends_well(given):
        good = " or ".join(str(count) for count in near if ends_well(count))
        raise RequestError(
            f"{protocol}: with max_message_rounds {given} the last round is not the verifier's, which has to "
            f"decide there; use {good}"
        )
    return given


def schedule(
    protocol: str,
    cycle: Cycle,
    count: int,
    min_rounds: int,
    channels: Mapping[str, str],
    scale: Scale,
    headers: Mapping[str, str],
) -> tuple[Round, ...]:
    """`count` rounds of a cycle; `channels` are those that the provers write on.

    The verifier writes on all of them, under `headers` by channel. It may decide from round `min_rounds`
    on, counted from 1, and must in the last. Raises RequestError when that is later than the last.
    """
    if not 1 <= min_rounds <= count:
        raise RequestError(
            f"{protocol}: min_message_rounds must lie between 1 and {count}, found {min_rounds}"
        )
    everywhere = tuple(dict.fromkeys(channels.values()))
    its_headers = tuple(headers[channel] for channel in everywhere) if headers else ()

    def turn_of(agent: str, number: int) -> Turn:
        if agent != VERIFIER:
            return Turn(agent, (channels[agent],), scale=scale)
        if number == count:
            return Turn(agent, (), "must", scale)
        decide: Decides = "may" if number >= min_rounds else "no"
        return Turn(agent, everywhere, decide, scale, its_headers)

    return tuple(
        tuple(turn_of(agent, number) for agent in cycle[(number - 1) % len(cycle)])
        for number in range(1, count + 1)
    )
