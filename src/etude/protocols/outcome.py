"""An outcome: what a round came to. Every one that can be, and what payoffs make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING, TypeAlias

from etude.protocols.decision import ACCEPT, REJECT, Verdict, sign
from etude.protocols.turn import Round, Turn

if TYPE_CHECKING:
    from etude.protocols.protocol import Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round came to: all that payoffs may depend on."""

    truth: Verdict
    """The right verdict."""
    stance: Verdict
    """The verdict that the example has its provers argue for, where a role leaves it to the example."""
    over: bool
    """Whether the play ended with this round."""
    decider: str | None = None
    """Of the round's agents the one whose role may decide, whether or not it did."""
    decision: float | None = None
    """In [-1, 1], from reject to accept; None when there was none."""
    invalid: frozenset[str] = frozenset()
    """Agents whose answer stayed malformed."""


Payoff: TypeAlias = Callable[[Outcome], Mapping[str, float]]
"""What each agent earns with a round; agents that are left out earn nothing. A pure function."""


def resolve(
    protocol: Protocol,
    turns: Round,
    *,
    last: bool,
    truth: Verdict,
    stance: Verdict,
    decision: float | None,
    invalid: frozenset[str],
) -> Outcome:
    """What a round comes to when it has been played: `last` is whether no round follows it."""
    if protocol.forced is not None and (decision is not None or last):
        decision = float(sign(_forced(protocol, truth)))
    cut_short = any(protocol.agents[agent].must_be_valid for agent in invalid)
    return Outcome(
        truth=truth,
        stance=stance,
        over=last or decision is not None or cut_short,
        decider=next((turn.agent for turn in turns if protocol.agents[turn.agent].may_decide), None),
        decision=decision,
        invalid=invalid,
    )


def outcomes(
    protocol: Protocol, turns: Round, *, last: bool, truth: Verdict, stance: Verdict
) -> Iterator[Outcome]:
    """Every outcome that a round can come to."""
    deciding = next((turn for turn in turns if turn.decide != "no"), None)
    for invalid in _subsets([turn.agent for turn in turns]):
        for decision in _decisions(deciding, invalid):
            yield resolve(
                protocol,
                turns,
                last=last,
                truth=truth,
                stance=stance,
                decision=decision,
                invalid=invalid,
            )


def _forced(protocol: Protocol, truth: Verdict) -> Verdict:
    if protocol.forced == "truth":
        return truth
    return ACCEPT if protocol.forced == "accept" else REJECT


def _decisions(deciding: Turn | None, invalid: frozenset[str]) -> tuple[float | None, ...]:
    """The decisions that a turn can bring, none at all among them."""
    if deciding is None or deciding.agent in invalid:
        return (None,)
    return (*deciding.scale.values, *(() if deciding.decide == "must" else (None,)))


def _subsets(agents: list[str]) -> Iterator[frozenset[str]]:
    sizes = range(len(agents) + 1)
    return map(frozenset, chain.from_iterable(combinations(agents, size) for size in sizes))
