"""The rules of a protocol: its roles, turns and rounds, the log of a play, and how a round is resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.core.keys import fold
from etude.protocols.decision import ACCEPT, ACCEPT_REJECT, REJECT, Scale, Verdict, Vote, sign


@dataclass(frozen=True, slots=True)
class Utterance:
    """One answer, as it counts in the play."""

    round: int
    """From 0."""
    agent: str
    text: str = ""
    """The answer as the model wrote it."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """Its messages, by channel; empty for a secret decision and for a malformed answer."""
    decision: float | None = None
    """In [-1, 1], from reject to accept; None when it does not decide."""
    malformed: bool = False
    """Whether no attempt was usable."""


@dataclass(frozen=True)
class PlayLog:
    """Everything that was said on one way through a play, on all channels, oldest first.

    Agents of one round are in the order of their turns. Where a play branches, every branch has a log of
    its own.
    """

    utterances: tuple[Utterance, ...] = ()

    def __iter__(self) -> Iterator[Utterance]:
        return iter(self.utterances)

    def __len__(self) -> int:
        return len(self.utterances)

    def of(self, agent: str) -> tuple[Utterance, ...]:
        """The answers of an agent."""
        return tuple(utterance for utterance in self.utterances if utterance.agent == agent)

    def on(self, channel: str) -> tuple[str, ...]:
        """The messages on a channel."""
        return tuple(
            utterance.messages[channel] for utterance in self.utterances if channel in utterance.messages
        )

    def last(self, agent: str) -> Utterance | None:
        """The last answer of an agent; None before its first."""
        own = self.of(agent)
        return own[-1] if own else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a round: all that payoffs may depend on."""

    truth: Verdict
    """The right verdict."""
    stance: Verdict
    """The verdict that the example has its provers argue for, where a role leaves it to the example."""
    over: bool
    """Whether the play ended with this round."""
    decider: str | None = None
    """Of the round's agents the one whose role may decide, whether or not it did; of several the first."""
    decision: float | None = None
    """The verdict, in [-1, 1], from reject to accept; None when there was none. With a vote, that of the
    ballots."""
    invalid: frozenset[str] = frozenset()
    """Agents whose answer stayed malformed."""
    ballots: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The latest decision of each agent that has decided in the play, as it gave it."""
    sides: Mapping[str, Verdict] = field(default_factory=dict, hash=False)
    """The verdict that each agent argues for in this play; those that argue for nothing are left out."""
    log: PlayLog = field(default_factory=PlayLog, hash=False)
    """Everything that was said so far, this round included."""


Payoff: TypeAlias = Callable[[Outcome], Mapping[str, float]]
"""The rewards of a round by agent; agents that are left out earn nothing. A pure function."""


Decides: TypeAlias = Literal["no", "may", "must"]
Stance: TypeAlias = Literal[0, 1, "example", "drawn", "opposed"]
"""The verdict that an agent argues for. `example` leaves it to each example, `drawn` to a coin that is
tossed for each play, and `opposed` is the side that the coin did not show."""
STANCES: tuple[Stance, ...] = (0, 1, "example", "drawn", "opposed")


@dataclass(frozen=True, slots=True)
class Role:
    """The part that an agent has in a protocol."""

    kind: str
    """`prover`, `verifier`, or a word of your own."""
    may_decide: bool = False
    stance: Stance | None = None
    """None for an agent that argues for nothing."""
    label: str = ""
    """Its name in the prompts of others; empty for the agent's own name."""
    anonymous: bool = False
    """Whether others do not learn who speaks."""
    must_be_valid: bool = False
    """Whether the play ends when its answer stays malformed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An agent's turn: the channels it writes on, and whether it may or must decide instead."""

    agent: str
    writes: tuple[str, ...] = ()
    decide: Decides = "no"
    scale: Scale = ACCEPT_REJECT
    """The answers that count as a decision."""
    headers: tuple[str, ...] = ()
    """In a turn that writes on several channels: the text that starts the part of an answer for each."""
    open: bool = False
    """Whether a decision is announced on the channels that the turn writes on: an open ballot. Otherwise
    nobody hears it, nor the text beside it."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The channels with their headers; by default a header is the channel's name and a colon."""
        headers = self.headers or tuple(f"{channel}:" for channel in self.writes)
        return tuple(zip(self.writes, headers, strict=True))

    def announced(self, decision: float) -> dict[str, str]:
        """The messages by which others hear of a decision, by channel: none, unless the ballot is open."""
        return dict.fromkeys(self.writes, f"Decision: {self.scale.text_of(decision)}") if self.open else {}


Round: TypeAlias = tuple[Turn, ...]
"""Turns that are taken at the same time: none of them sees another."""


@dataclass(frozen=True, eq=False)
class Fork:
    """A round that is chosen during the play, by everything said so far.

    The options are data, and are checked like any round; only the choice waits for the play.
    """

    choose: Callable[[PlayLog], str]
    """Names an option, given everything that was said before the round. A pure function."""
    options: Mapping[str, Round]
    """The rounds to choose from, by name; an empty one passes without a turn."""

    def __post_init__(self) -> None:
        """Freeze the options."""
        frozen = {name: tuple(turns) for name, turns in self.options.items()}
        object.__setattr__(self, "options", MappingProxyType(frozen))


Stage: TypeAlias = Round | Fork
"""One step of a schedule."""

Schedule: TypeAlias = tuple[Stage, ...]
"""The rounds of a play, in order."""


def rounds_at(stage: Stage) -> tuple[Round, ...]:
    """The possible rounds of a stage; an empty one where it may be passed over."""
    return tuple(stage.options.values()) if isinstance(stage, Fork) else (stage,)


def turns_at(stage: Stage) -> tuple[Turn, ...]:
    """All possible turns of a stage."""
    return tuple(turn for turns in rounds_at(stage) for turn in turns)


Bounds: TypeAlias = Mapping[str, tuple[float, float]]
"""The least and the most that each agent can earn in a play."""


@dataclass(frozen=True)
class Rules:
    """Who speaks when, who hears it, who decides, and what it is worth."""

    name: str
    agents: Mapping[str, Role]
    channels: Mapping[str, frozenset[str]]
    """The readers of each channel."""
    schedules: tuple[Schedule, ...]
    """The rounds. Where there are several schedules, each play draws one of them."""
    payoff: Payoff
    bounds: Bounds = field(default_factory=dict)
    """The least and the most that each agent can earn in a play; left empty: not known."""
    shuffle_channels: bool = False
    """Whether the channels of a round are read in an order that is drawn anew for each round."""
    forced: Literal["accept", "reject", "truth"] | None = None
    """Replaces every decision, and stands for a last turn without one."""
    vote: Vote | None = None
    """Turns the ballots of several agents into a verdict. Without it, one agent may decide in a round, and
    the first decision is the verdict."""
    needs_verdict: bool = True
    """Whether the last round has to bring a verdict. Otherwise a play may just end, with none."""

    def __post_init__(self) -> None:
        """Freeze the mappings and schedules."""
        readers = {channel: frozenset(names) for channel, names in self.channels.items()}
        schedules = tuple(
            tuple(stage if isinstance(stage, Fork) else tuple(stage) for stage in schedule)
            for schedule in self.schedules
        )
        object.__setattr__(self, "agents", MappingProxyType(dict(self.agents)))
        object.__setattr__(self, "channels", MappingProxyType(readers))
        object.__setattr__(self, "schedules", schedules)
        object.__setattr__(self, "bounds", MappingProxyType(dict(self.bounds)))

    @property
    def max_rounds(self) -> int:
        """Rounds of the longest schedule."""
        return max(len(schedule) for schedule in self.schedules)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All possible turns, in the order of the schedules."""
        return tuple(turn for schedule in self.schedules for stage in schedule for turn in turns_at(stage))

    def rounds(self, key: int) -> Schedule:
        """The schedule of the play with this key."""
        return self.schedules[key % len(self.schedules)]

    def writers(self, channel: str) -> frozenset[str]:
        """The agents with a turn that writes on a channel."""
        return frozenset(turn.agent for turn in self.turns if channel in turn.writes)

    def label(self, agent: str) -> str:
        """The name of an agent in the prompts of others."""
        return self.agents[agent].label or agent

    def stance_of(self, agent: str, stance: Verdict, drawn: Verdict = ACCEPT) -> Verdict | None:
        """The verdict that an agent argues for on an example with that stance, when `drawn` was drawn."""
        match self.agents[agent].stance:
            case "example":
                return stance
            case "drawn":
                return drawn
            case "opposed":
                return REJECT if drawn == ACCEPT else ACCEPT
            case own:
                return own

    def sides(self, stance: Verdict, drawn: Verdict) -> dict[str, Verdict]:
        """The verdict that each agent argues for; those that argue for nothing are left out."""
        sides = {agent: self.stance_of(agent, stance, drawn) for agent in self.agents}
        return {agent: side for agent, side in sides.items() if side is not None}

    @property
    def draws_sides(self) -> bool:
        """Whether a coin is tossed for each play."""
        return any(role.stance in ("drawn", "opposed") for role in self.agents.values())


def drawn_side(key: int) -> Verdict:
    """The side that the coin shows in the play with this key, along all of its branches."""
    return ACCEPT if fold(key, "side") % 2 else REJECT


def voters_of(rules: Rules, schedule: Schedule) -> tuple[str, ...]:
    """The agents with a turn to decide in a schedule, in the order of the protocol."""
    deciding = {turn.agent for stage in schedule for turn in turns_at(stage) if turn.decide != "no"}
    return tuple(agent for agent in rules.agents if agent in deciding)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a play that hold whatever is said in it."""

    truth: Verdict
    """The right verdict."""
    stance: Verdict
    """The side that the example has."""
    drawn: Verdict
    """The side that was drawn for the play."""
    voters: tuple[str, ...]
    """The agents with a turn to decide in its schedule."""


def resolve(rules: Rules, facts: Facts, turns: Round, log: PlayLog, *, last: bool) -> Outcome:
    """The outcome of a round that has been played.

    `log` ends with the answers of the round, in the order of its turns; `last` is whether no round
    follows it. Raises RequestError when the vote gives no verdict in [-1, 1] and not None either.
    """
    answers = log.utterances[-len(turns) :]
    ballots = {answer.agent: answer.decision for answer in log if answer.decision is not None}
    invalid = frozenset(answer.agent for answer in answers if answer.malformed)
    decision = _verdict(rules, facts, answers, ballots)
    if rules.forced is not None and (decision is not None or last):
        forced = {"accept": ACCEPT, "reject": REJECT, "truth": facts.truth}[rules.forced]
        decision = float(sign(forced))
    cut_short = any(rules.agents[agent].must_be_valid for agent in invalid)
    return Outcome(
        truth=facts.truth,
        stance=facts.stance,
        over=last or decision is not None or cut_short,
        decider=next((turn.agent for turn in turns if rules.agents[turn.agent].may_decide), None),
        decision=decision,
        invalid=invalid,
        ballots=ballots,
        sides=rules.sides(facts.stance, facts.drawn),
        log=log,
    )


def chosen(stage: Stage, log: PlayLog) -> Round:
    """The turns of a stage, given everything said before it.

    Raises RequestError when a fork chooses what is not among its options.
    """
    if not isinstance(stage, Fork):
        return stage
    name = stage.choose(log)
    if not isinstance(name, str) or name not in stage.options:
        raise RequestError(
            f"a fork chose {name!r:.60}, which is not there" + alternatives(str(name), stage.options)
        )
    return stage.options[name]


def next_round(schedule: Schedule, number: int, log: PlayLog) -> tuple[int, Round] | None:
    """The first round from `number` on in which somebody has a turn; None when the play is over.

    Raises RequestError as `chosen`.
    """
    for later in range(number, len(schedule)):
        try:
            turns = chosen(schedule[later], log)
        except RequestError as error:
            raise RequestError(f"in round {later}, {error}") from None
        if turns:
            return later, turns
    return None


def _verdict(
    rules: Rules, facts: Facts, answers: Sequence[Utterance], ballots: dict[str, float]
) -> float | None:
    cast = [answer.decision for answer in answers if answer.decision is not None]
    if not cast or rules.vote is None:
        return cast[0] if cast else None
    verdict = rules.vote({voter: ballots.get(voter) for voter in facts.voters})
    if verdict is None:
        return None
    if isinstance(verdict, bool) or not isinstance(verdict, int | float) or not -1 <= verdict <= 1:
        raise RequestError(f"the vote came to {verdict!r:.60}; a verdict is a number from -1 to 1, or None")
    return float(verdict)
