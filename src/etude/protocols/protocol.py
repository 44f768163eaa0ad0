"""A protocol as data: who speaks when, who hears it, who decides on which scale, and the payoffs."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Literal, TypeAlias

from etude.core.errors import RequestError, alternatives
from etude.protocols.tree import ACCEPT, Node, Verdict


@dataclass(frozen=True, slots=True)
class Scale:
    """The answers that count as a decision. Each option is a text and a value from -1 (reject) to 1."""

    name: str
    options: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        """Raise RequestError for texts that are equal or in upper case, and for values out of order."""
        texts, values = self.texts, self.values
        readable = all(text and text == text.strip().lower() for text in texts)
        rising = len(values) > 1 and all(low < high for low, high in pairwise(values))
        fits = rising and -1 <= values[0] < 0 < values[-1] <= 1
        if len({*texts}) < len(texts) or not readable or not fits:
            raise RequestError(
                f"scale '{self.name}': the texts must be distinct and in lower case, and the values must "
                f"rise from reject to accept within [-1, 1], found {self.options}"
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts, from reject to accept."""
        return tuple(text for text, _ in self.options)

    @property
    def values(self) -> tuple[float, ...]:
        """The values, from reject to accept."""
        return tuple(value for _, value in self.options)

    def strongest(self, verdict: Verdict) -> str:
        """Return the option text that accepts or rejects most strongly."""
        return self.options[-1 if verdict == ACCEPT else 0][0]

    def read(self, text: str) -> float | None:
        """Return the value of the option that the text starts with, or None.

        Case, quotes and emphasis do not matter. `7/10` is 7. An echo such as `accept or reject?` is not a
        decision, nor is a range such as `7-8`, or `8%` where the scale does not end at 100.
        """
        answer = text.lstrip(_MARKS).lower()
        for option, value in sorted(self.options, key=lambda option: -len(option[0])):
            rest = answer[len(option) :]
            if answer.startswith(option) and not _GOES_ON.match(rest):
                out_of = _OUT_OF.match(rest)
                return value if out_of is None or (out_of[1] or "100") == self.texts[-1] else None
        return None


_MARKS = " \t\r\n*_`\"'“”:"
_GOES_ON = re.compile(r"\w|[.,]\d|\s*[/|]\s*[a-z]|\s*[-–]\s*\d|\s+or\b")
_OUT_OF = re.compile(r"\s*(?:(?:/|out of)\s*(\d+)|%)")

_DISAGREE = (("strongly disagree", -1.0),)
_AGREE = (("strongly agree", 1.0),)
_THIRDS = (("disagree", -2 / 3), ("somewhat disagree", -1 / 3)), (("somewhat agree", 1 / 3), ("agree", 2 / 3))
_UNSURE = (("neither agree nor disagree", 0.0),)

ACCEPT_REJECT = Scale("accept_reject", (("reject", -1.0), ("accept", 1.0)))


def _whole_numbers(most: int, name: str) -> Scale:
    """Return the scale of whole numbers from 0 to `most`, with `most / 2` for neither."""
    return Scale(name, tuple((str(number), 2 * number / most - 1) for number in range(most + 1)))


SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        scale.name: scale
        for scale in (
            ACCEPT_REJECT,
            Scale("accept_reject_neither", (("reject", -1.0), ("neither", 0.0), ("accept", 1.0))),
            Scale("likert_scale_4", (*_DISAGREE, ("disagree", -0.5), ("agree", 0.5), *_AGREE)),
            Scale("likert_scale_5", (*_DISAGREE, ("disagree", -0.5), *_UNSURE, ("agree", 0.5), *_AGREE)),
            Scale("likert_scale_6", (*_DISAGREE, *_THIRDS[0], *_THIRDS[1], *_AGREE)),
            Scale("likert_scale_7", (*_DISAGREE, *_THIRDS[0], *_UNSURE, *_THIRDS[1], *_AGREE)),
            _whole_numbers(10, "likert_int_scale_11"),
            _whole_numbers(10, "out_of_10"),
            _whole_numbers(100, "out_of_100"),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a round: everything that payoffs may depend on."""

    truth: Verdict
    """The right verdict."""
    stance: Verdict
    """The verdict that agents with the stance `example` argue for on this example."""
    over: bool
    """Whether the play ended with this round."""
    decider: str | None = None
    """The agent of the round whose role may decide, whether or not it decided."""
    decision: float | None = None
    """The verdict, from -1 (reject) to 1 (accept); None when there was none."""
    invalid: frozenset[str] = frozenset()
    """Agents whose answer stayed malformed."""
    log: tuple[Node, ...] = field(default=(), hash=False)
    """Every answer on the path so far, including this round's."""


Payoff: TypeAlias = Callable[[Outcome], Mapping[str, float]]
"""A pure function that returns each agent's reward for a round. Agents that it leaves out earn nothing."""


Decides: TypeAlias = Literal["no", "may", "must"]
Stance: TypeAlias = Literal[0, 1, "example"]
"""The verdict that an agent argues for. `example` leaves it to each example."""


@dataclass(frozen=True, slots=True)
class Role:
    """The part that an agent has in a protocol."""

    kind: str
    """`prover`, `verifier`, or a word you choose."""
    may_decide: bool = False
    stance: Stance | None = None
    """The verdict that it argues for; None when it argues for neither."""
    label: str = ""
    """Its name in the prompts of others; empty for the agent's own name."""
    anonymous: bool = False
    """Whether the speaker's name is hidden from other agents."""
    must_be_valid: bool = False
    """Whether the play ends when its answer is still malformed after all retries."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An agent's turn: the channels it writes on, and whether it may or must decide instead."""

    agent: str
    writes: tuple[str, ...] = ()
    decide: Decides = "no"
    scale: Scale = ACCEPT_REJECT
    """The answers that count as a decision."""
    headers: tuple[str, ...] = ()
    """The text that starts each channel's part of an answer, in a turn that writes on several channels."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The channels with their headers. A header defaults to the channel's name and a colon."""
        headers = self.headers or tuple(f"{channel}:" for channel in self.writes)
        return tuple(zip(self.writes, headers, strict=True))


Round: TypeAlias = tuple[Turn, ...]
"""Turns that are taken at the same time: none of their agents sees the answers of the others."""

Schedule: TypeAlias = tuple[Round, ...]
"""The rounds of a play, in order."""


@dataclass(frozen=True)
class Protocol:
    """A multi-agent exchange as data, checked when it is built.

    Raises RequestError for unknown names, two writers on a channel in one round, and a writer that cannot
    read its channel. It also raises for a deciding turn of an agent that may not decide, and for several
    deciders in one round. A schedule that needs a verdict must end in a must-decide turn.
    """

    name: str
    agents: Mapping[str, Role]
    channels: Mapping[str, frozenset[str]]
    """The readers of each channel."""
    schedules: tuple[Schedule, ...]
    """The possible schedules. Each play draws one of them."""
    payoff: Payoff
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The lowest and highest total reward of each agent in a play; empty when unknown."""
    shuffle_channels: bool = False
    """Whether agents read the channels of each round in a random order."""
    forced: Literal["accept", "reject", "truth"] | None = None
    """The verdict that replaces every decision, and the missing decision of a last turn."""
    needs_verdict: bool = True
    """Whether the last round must bring a verdict. Otherwise a play may end without one."""

    def __post_init__(self) -> None:
        """Freeze the mappings and schedules, and check the protocol."""
        readers = {channel: frozenset(names) for channel, names in self.channels.items()}
        try:
            schedules = tuple(tuple(map(tuple, schedule)) for schedule in self.schedules)
        except TypeError:
            nested = "`schedules` has schedules, which have rounds, which have turns: (((Turn(…),), …),)"
            raise RequestError(f"protocol '{self.name}': {nested}") from None
        object.__setattr__(self, "agents", MappingProxyType(dict(self.agents)))
        object.__setattr__(self, "channels", MappingProxyType(readers))
        object.__setattr__(self, "schedules", schedules)
        object.__setattr__(self, "bounds", MappingProxyType(dict(self.bounds)))
        for fault in _faults(self):
            raise RequestError(f"protocol '{self.name}': {fault}")

    @property
    def max_rounds(self) -> int:
        """The number of rounds in the longest schedule."""
        return max(len(schedule) for schedule in self.schedules)

    def rounds(self, key: int) -> Schedule:
        """Return the schedule of the play with this key."""
        return self.schedules[key % len(self.schedules)]

    def writers(self, channel: str) -> frozenset[str]:
        """Return the agents that have a turn in which they write on the channel."""
        rounds = chain.from_iterable(self.schedules)
        return frozenset(turn.agent for turns in rounds for turn in turns if channel in turn.writes)

    def label(self, agent: str) -> str:
        """Return the agent's name as it appears in the prompts of others."""
        return self.agents[agent].label or agent


def _faults(protocol: Protocol) -> Iterator[str]:
    """Yield each fault of the protocol. A check may assume that all earlier checks passed."""
    agents, channels, bounds = protocol.agents, protocol.channels, protocol.bounds
    if not protocol.schedules or not all(protocol.schedules):
        yield "it has no rounds"
    for channel, readers in channels.items():
        yield from _unknown_names(sorted(readers), agents, f"channel '{channel}' is read by")
    yield from _unknown_names(bounds, agents, "bounds are for")
    for agent in agents if bounds else ():
        if agent not in bounds:
            yield f"'{agent}' has no bounds; give them for all agents or for none"
        elif not bounds[agent][0] <= bounds[agent][1]:
            yield f"the bounds of '{agent}' are {bounds[agent]}; the lower bound comes first"
    for schedule in protocol.schedules:
        last = len(schedule) - 1
        for number, turns in enumerate(schedule):
            where = f"round {number}"
            yield from _faults_of_round(protocol, where, turns)
            # A round that must decide ends the play.
            must = any(turn.decide == "must" for turn in turns)
            if must and number != last:
                yield f"nothing can follow {where}, which must decide"
            if protocol.needs_verdict and number == last and not must:
                speakers = " and ".join(f"'{turn.agent}'" for turn in turns)
                yield (
                    f"the last round ({last}) does not oblige {speakers} to decide; end with a turn that "
                    "must decide, or set `needs_verdict=False`"
                )


def _faults_of_round(protocol: Protocol, where: str, turns: Round) -> Iterator[str]:
    agents, channels = protocol.agents, protocol.channels
    if not turns:
        yield f"{where} has no turns"
    speakers, writers = list[str](), dict[str, str]()
    for turn in turns:
        agent = turn.agent
        yield from _unknown_names([agent], agents, f"{where} has a turn of")
        yield from _unknown_names(turn.writes, channels, f"'{agent}' writes in {where} on")
        if agent in speakers:
            yield f"'{agent}' has two turns in {where}"
        if turn.headers and len(turn.headers) != len(turn.writes):
            yield f"'{agent}' has {len(turn.headers)} headers for {len(turn.writes)} channels in {where}"
        if turn.decide != "no" and not agents[agent].may_decide:
            yield f"'{agent}' {turn.decide} decide in {where}, but its role may not"
        if turn.decide == "no" and not turn.writes:
            yield f"'{agent}' neither writes nor decides in {where}"
        for channel in turn.writes:
            if agent not in channels[channel]:
                yield f"'{agent}' writes on channel '{channel}' in {where}, but cannot read it"
            if writers.setdefault(channel, agent) != agent:
                yield f"'{writers[channel]}' and '{agent}' both write on channel '{channel}' in {where}"
        speakers.append(agent)
    deciders = [agent for agent in speakers if agents[agent].may_decide]
    if len(deciders) > 1:
        yield f"{' and '.join(deciders)} may both decide in {where}, but the first decision ends the play"


def _unknown_names(names: Iterable[str], known: Collection[str], where: str) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"{where} '{name}', which does not exist" + alternatives(name, known)
