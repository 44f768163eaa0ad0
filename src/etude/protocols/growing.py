"""Growing an episode tree: round by round, all branches at once."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from etude.core.errors import EpisodeError, RequestError
from etude.core.example import Example
from etude.protocols.act import Act, Malformed
from etude.protocols.asking import Question, Said
from etude.protocols.checks import within
from etude.protocols.decision import VERDICTS, Verdict
from etude.protocols.guess import answer_for
from etude.protocols.log import log_of, play_log
from etude.protocols.made_up import ballot
from etude.protocols.outcome import Outcome
from etude.protocols.protocol import Protocol
from etude.protocols.resolving import Facts, next_round, resolve
from etude.protocols.rules import drawn_side, voters_of
from etude.protocols.scenario import Scenario
from etude.protocols.survey import check_earned
from etude.protocols.tree import EpisodeTree, Node
from etude.protocols.turn import Round, Turn
from etude.protocols.widths import Widths

Path = tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Play:
    """What a play is about."""

    protocol: Protocol
    scenario: Scenario
    example: Example
    widths: Widths
    key: int
    """Seed of the play's own draws: the schedule, the sides and the order of channels."""

    @property
    def truth(self) -> Verdict:
        """The right verdict. Raises EpisodeError when the scenario has none."""
        return _verdict("truth", self.scenario.truth(self.example), self.example)

    @property
    def stance(self) -> Verdict:
        """The example's stance; drawn where it has none. Raises EpisodeError when it is no verdict."""
        own = self.scenario.stance(self.example)
        return self.drawn if own is None else _verdict("stance", own, self.example)

    @property
    def drawn(self) -> Verdict:
        """The side that the coin shows."""
        return drawn_side(self.key)


class Answers(typing.Protocol):
    """Whatever answers the turns of a play: the agents' models, or a script."""

    async def ask(self, questions: Sequence[Question]) -> list[Said]:
        """The answers to the questions of a round, in their order."""


async def grow(play: Play, asker: Answers) -> EpisodeTree:
    """Play a protocol to its end, along all branches.

    All branches take their round together. So the order of the questions does not depend on which model
    answers first, and a play that is taken up again asks what it had asked. Raises what `asker` raises,
    and EpisodeError for a payoff outside its bounds, or a vote or fork that gives what there is not.
    """
    return await _Growing(play, asker).tree()


@dataclass(frozen=True, slots=True)
class _Way:
    """One way that the play went so far, and the round that it comes to."""

    path: Path
    number: int
    turns: Round


class _Growing:
    """A tree that grows."""

    def __init__(self, play: Play, asker: Answers) -> None:
        self._play = play
        self._protocol = play.protocol
        self._asker = asker
        self._schedule = play.protocol.rounds(play.key)
        voters = voters_of(play.protocol, self._schedule)
        self._facts = Facts(play.truth, play.stance, play.drawn, voters)
        self._nodes: list[Node] = []
        self._guesses: dict[Turn, str | None] = {}

    async def tree(self) -> EpisodeTree:
        """Grow it to the end."""
        protocol, facts = self._protocol, self._facts
        ways = self._ways((), 0)
        for number in range(len(self._schedule)):
            here = [way for way in ways if way.number == number]
            questions = [question for way in here for question in self._questions(way)]
            answers = iter(await self._asker.ask(questions)) if questions else iter(())
            ways = [way for way in ways if way.number > number]
            for way in here:
                for path in self._branches(way, answers):
                    ways += self._completed(way, path)
        return EpisodeTree(
            protocol=protocol.name,
            agents=tuple(protocol.agents),
            channels=tuple(protocol.channels),
            max_rounds=protocol.max_rounds,
            truth=facts.truth,
            stance=facts.stance,
            key=self._play.key,
            bounds=dict(protocol.bounds),
            nodes=tuple(self._nodes),
            sides=protocol.sides(facts.stance, facts.drawn) if protocol.draws_sides else {},
        )

    def _ways(self, path: Path, number: int) -> list[_Way]:
        """Where a path leads from round `number` on; nowhere when the play is over."""
        with self._located():
            following = next_round(self._schedule, number, play_log(path))
        return [] if following is None else [_Way(path, *following)]

    def _questions(self, way: _Way) -> Iterator[Question]:
        """What the agents of a round are asked, once for each answer that is wanted."""
        play = self._play
        for turn in way.turns:
            log = log_of(
                self._protocol,
                self._schedule,
                way.path,
                turn.agent,
                way.number,
                stance=self._facts.stance,
                key=play.key,
            )
            question = Question(turn, play.scenario.render(play.example, log, turn.agent, turn))
            for _ in range(play.widths.at(turn.agent, way.number)):
                yield question

    def _branches(self, way: _Way, answers: Iterator[Said]) -> list[Path]:
        """The path with each combination of the answers of a round."""
        branches = [way.path]
        for turn in way.turns:
            said = [next(answers) for _ in range(self._play.widths.at(turn.agent, way.number))]
            extended: list[Path] = []
            for branch in branches:
                for answer in said:
                    self._nodes.append(self._node(branch, way.number, turn, answer))
                    extended.append((*branch, self._nodes[-1]))
            branches = extended
        return branches

    def _node(self, path: Path, number: int, turn: Turn, said: Said) -> Node:
        act = said.act if isinstance(said.act, Act) else Act()
        heard = {} if act.decision is None else ballot(turn, act.decision)
        return Node(
            id=len(self._nodes),
            parent=path[-1].id if path else None,
            round=number,
            agent=turn.agent,
            call=said.call,
            text=said.text,
            messages={**act.messages, **heard},
            decision=act.decision,
            malformed=said.act.reason if isinstance(said.act, Malformed) else None,
            truncated=said.truncated,
            rejected=said.rejected,
            guess=self._guess(turn),
        )

    def _guess(self, turn: Turn) -> str | None:
        """The answer that gives the right verdict, in a turn that may decide."""
        if turn.decide == "no":
            return None
        if turn not in self._guesses:
            self._guesses[turn] = answer_for(self._play.scenario, turn, self._facts.truth)
        return self._guesses[turn]

    def _completed(self, way: _Way, path: Path) -> list[_Way]:
        """Pay for a round, and go on after it unless the play is over."""
        protocol, log = self._protocol, play_log(path)
        following: list[_Way] = []
        with self._located(f"in round {way.number}, "):
            outcome = resolve(protocol, self._facts, way.turns, log, last=False)
            if not outcome.over:
                # Only here: a fork need not know what to make of a play that is over.
                following = self._ways(path, way.number + 1)
                outcome = resolve(protocol, self._facts, way.turns, log, last=not following)
            earned = protocol.payoff(outcome)
            check_earned(protocol, outcome, earned)
        rewards = {agent: float(value) for agent, value in earned.items() if value}
        node = self._nodes[path[-1].id] = replace(path[-1], rewards=rewards)
        whole = (*path[:-1], node)
        if not outcome.over:
            return [replace(next_way, path=whole) for next_way in following]
        self._nodes[node.id] = replace(node, ending=_ending(protocol, outcome), verdict=outcome.decision)
        self._check_bounds(whole)
        return []

    def _check_bounds(self, path: Path) -> None:
        """Bounds that were worked out hold; those that were given are held to where they may be left."""
        protocol = self._protocol
        if not (protocol.has_given_bounds and protocol.untried):
            return
        for agent, bounds in protocol.bounds.items():
            total = math.fsum(node.rewards.get(agent, 0.0) for node in path)
            if not within(total, bounds):
                raise EpisodeError(
                    f"protocol '{protocol.name}': '{agent}' earned {total:g} in this play, outside its "
                    f"bounds {bounds[0]:g} to {bounds[1]:g}"
                )

    @contextmanager
    def _located(self, where: str = "") -> Iterator[None]:
        """An error of the protocol's own functions fails the episode, and says where."""
        try:
            yield
        except RequestError as error:
            raise EpisodeError(f"protocol '{self._protocol.name}': {where}{error}") from error


def _ending(protocol: Protocol, outcome: Outcome) -> str:
    if outcome.decision is not None:
        return "decided"
    cut_short = any(protocol.agents[agent].must_be_valid for agent in outcome.invalid)
    return "invalid" if cut_short else "undecided"


def _verdict(what: str, found: Any, example: Example) -> Verdict:
    for verdict in VERDICTS:
        if found == verdict:
            return verdict
    raise EpisodeError(
        f"the scenario's {what} of example '{example.id}' is {found!r}; it must be 0 (reject) or 1 (accept)"
    )
