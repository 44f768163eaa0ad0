"""What a protocol must be like, checked when it is built."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import TYPE_CHECKING

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.protocols.bounds import earned_in_a_play
from etude.protocols.decision import VERDICTS
from etude.protocols.outcome import outcomes
from etude.protocols.turn import Round, Turn

if TYPE_CHECKING:
    from etude.protocols.protocol import Protocol

_TOLERANCE = 1e-9


def check_protocol(protocol: Protocol) -> None:
    """Raises RequestError with the first thing that is wrong."""
    _check_names(protocol)
    for rounds in protocol.schedules:
        for number, turns in enumerate(rounds):
            _check_round(protocol, number, turns)
        _check_end(protocol, rounds)
    _check_payoffs(protocol)
    if protocol.bounds:
        _check_bounds(protocol)


def _check_names(protocol: Protocol) -> None:
    if not protocol.agents:
        raise _wrong(protocol, "it has no agents")
    for channel, readers in protocol.channels.items():
        for reader in sorted(readers):
            _require(protocol, reader, protocol.agents, f"channel '{channel}' is read by")
    if not protocol.schedules or not all(protocol.schedules):
        raise _wrong(protocol, "it has no rounds")
    if protocol.forced not in (None, "accept", "reject", "truth"):
        raise _wrong(protocol, f"a forced decision is accept, reject or truth, not {protocol.forced!r}")


def _check_round(protocol: Protocol, number: int, turns: Round) -> None:
    where = f"round {number}"
    if not turns:
        raise _wrong(protocol, f"{where} has no turns")
    twice = _repeated([turn.agent for turn in turns])
    if twice:
        raise _wrong(protocol, f"'{twice}' has two turns in {where}")
    for turn in turns:
        _check_turn(protocol, where, turn)
    channel = _repeated([channel for turn in turns for channel in turn.writes])
    if channel:
        writers = " and ".join(f"'{turn.agent}'" for turn in turns if channel in turn.writes)
        raise _wrong(protocol, f"{writers} both write on channel '{channel}' in {where}")
    deciders = [turn.agent for turn in turns if protocol.agents[turn.agent].may_decide]
    if len(deciders) > 1:
        raise _wrong(
            protocol, f"{' and '.join(deciders)} may both decide in {where}; one verdict ends a play"
        )


def _check_turn(protocol: Protocol, where: str, turn: Turn) -> None:
    _require(protocol, turn.agent, protocol.agents, f"{where} is a turn of")
    for channel in turn.writes:
        _require(protocol, channel, protocol.channels, f"'{turn.agent}' writes in {where} on")
        if turn.agent not in protocol.channels[channel]:
            raise _wrong(
                protocol, f"'{turn.agent}' writes on channel '{channel}' in {where}, and cannot read it"
            )
    if _repeated(turn.writes):
        raise _wrong(
            protocol, f"'{turn.agent}' writes twice on channel '{_repeated(turn.writes)}' in {where}"
        )
    if turn.headers and len(turn.headers) != len(turn.writes):
        raise _wrong(
            protocol,
            f"'{turn.agent}' has {len(turn.headers)} headers in {where} for {len(turn.writes)} channels",
        )
    if turn.decide != "no" and not protocol.agents[turn.agent].may_decide:
        raise _wrong(protocol, f"'{turn.agent}' {turn.decide} decide in {where}, and its role may not")
    if turn.decide == "no" and not turn.writes:
        raise _wrong(protocol, f"'{turn.agent}' neither writes nor decides in {where}")


def _check_end(protocol: Protocol, rounds: tuple[Round, ...]) -> None:
    obliged = [number for number, turns in enumerate(rounds) if any(turn.decide == "must" for turn in turns)]
    if not obliged:
        speakers = " and ".join(f"'{turn.agent}'" for turn in rounds[-1])
        raise _wrong(
            protocol,
            f"the last round ({len(rounds) - 1}) is a turn of {speakers} that need not decide; "
            "end with a turn that must decide",
        )
    if obliged[0] != len(rounds) - 1:
        raise _wrong(protocol, f"nothing can follow round {obliged[0]}, which must decide")


def _check_payoffs(protocol: Protocol) -> None:
    for rounds, truth, stance in product(protocol.schedules, VERDICTS, VERDICTS):
        for number, turns in enumerate(rounds, 1):
            for outcome in outcomes(protocol, turns, last=number == len(rounds), truth=truth, stance=stance):
                for agent, value in protocol.payoff(outcome).items():
                    _require(protocol, agent, protocol.agents, "payoffs are for")
                    if not math.isfinite(value):
                        raise _wrong(protocol, f"the payoff of '{agent}' is {value} for {outcome}")


def _check_bounds(protocol: Protocol) -> None:
    missing = [agent for agent in protocol.agents if agent not in protocol.bounds]
    if missing:
        raise _wrong(protocol, f"'{missing[0]}' has no bounds; give them for all agents or for none")
    earned = earned_in_a_play(protocol)
    for agent, (low, high) in protocol.bounds.items():
        _require(protocol, agent, protocol.agents, "bounds are for")
        least, most = earned[agent]
        if least < low - _TOLERANCE or most > high + _TOLERANCE:
            raise _wrong(
                protocol,
                f"'{agent}' can earn {least:g} to {most:g} in a play, outside its bounds {low:g} to {high:g}",
            )


def _require(protocol: Protocol, name: str, known: Collection[str], where: str) -> None:
    if name not in known:
        raise _wrong(protocol, f"{where} '{name}', which is not there" + alternatives(name, known))


def _repeated(names: Collection[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _wrong(protocol: Protocol, what: str) -> RequestError:
    return RequestError(f"protocol '{protocol.name}': {what}")
