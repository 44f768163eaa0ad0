"""The growth of an episode tree: its branching widths, and the play of each round on all branches at once."""

import functools
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pydantic import FiniteFloat, TypeAdapter

from etude.config.import_path import user_code
from etude.core.episode import Example
from etude.core.errors import EpisodeError, RequestError, alternatives
from etude.core.keys import fold
from etude.core.message import Message
from etude.protocols.protocol import Outcome, Protocol, Round, Turn
from etude.protocols.scenario import Malformed, Move, Scenario, agent_log, answer_for
from etude.protocols.tree import ACCEPT, REJECT, VERDICTS, EpisodeTree, Node, Rejected, Verdict, sign

_TOLERANCE = 1e-9
_PAYOFF = TypeAdapter(dict[str, FiniteFloat])

Width: TypeAlias = int | Sequence[int]
"""The number of answers for each turn. A list gives it by round, and its last number serves later rounds."""

Widths: TypeAlias = Width | Mapping[str, Width]
"""One width for all agents, or by agent, with 1 for agents that are left out. 1 everywhere is a rollout, k
everywhere branches at each turn, and `[k, 1]` branches in the first round only. Agents of one round branch
one at a time: their answers are crossed, so two agents with k answers each make k * k branches."""


def check_widths(widths: Widths, agents: Collection[str]) -> None:
    """Raise RequestError for an unknown agent, and for a width that is no whole number of at least 1."""
    for agent, width in widths.items() if isinstance(widths, Mapping) else (("", widths),):
        if agent and agent not in agents:
            raise RequestError(f"widths: there is no agent '{agent}'" + alternatives(agent, agents))
        numbers = width if isinstance(width, Sequence) else [width]
        if not numbers or not all(type(answers) is int and answers >= 1 for answers in numbers):
            raise RequestError(
                f"a width must be a whole number of at least 1, or a list of them, found {width!r}"
            )


def number_of_answers(widths: Widths, agent: str, number: int) -> int:
    """Return the number of answers for an agent in round `number`, counted from 0."""
    width = widths.get(agent, 1) if isinstance(widths, Mapping) else widths
    return width[min(number, len(width) - 1)] if isinstance(width, Sequence) else width


def most_calls(protocol: Protocol, widths: Widths) -> int:
    """Return the maximum number of model calls of a play, when nobody decides early."""
    most = 0
    for schedule in protocol.schedules:
        calls, plays = 0, 1
        for number, turns in enumerate(schedule):
            answers = [number_of_answers(widths, turn.agent, number) for turn in turns]
            calls += plays * sum(answers)
            plays *= math.prod(answers)
        most = max(most, calls)
    return most


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt for the agent of a turn."""

    turn: Turn
    prompt: Sequence[Message]


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The final answer to a question, well-formed or not, and the rejected answers before it."""

    call: int
    text: str
    act: Move | Malformed
    truncated: bool = False
    rejected: tuple[Rejected, ...] = ()


Ask: TypeAlias = Callable[[Sequence[Question]], Awaitable[list[FinalAnswer]]]
"""Gives the answers to the questions of a round, in their order: by the agents' models, or by a script."""


@dataclass
class Play:
    """One play of a protocol on an example, with all of its branches.

    Raises EpisodeError if the scenario's truth or stance is not a verdict.
    """

    protocol: Protocol
    scenario: Scenario
    example: Example
    ask: Ask
    key: int
    """The seed for the play's draws: the schedule, the stance and the order of channels."""
    widths: Widths = 1

    def __post_init__(self) -> None:
        """Draw the schedule, and the stance unless the scenario sets it."""
        stance: int | None = self.scenario.stance(self.example)
        if stance is None:
            stance = fold(self.key, "side") % 2
        self._schedule = self.protocol.rounds(self.key)
        self._truth = self._verdict("truth", self.scenario.truth(self.example))
        self._stance = self._verdict("stance", stance)
        self._nodes: list[Node] = []
        self._guess = functools.cache(lambda turn: answer_for(self.scenario, turn, self._truth))

    async def grow(self) -> EpisodeTree:
        """Play to the end. All branches play each round together.

        So the order of the questions does not depend on which model answers first, and a resumed play asks
        the same questions. Passes on errors of `ask`. Raises EpisodeError for an invalid payoff.
        """
        protocol = self.protocol
        paths: list[tuple[Node, ...]] = [()]
        for number, turns in enumerate(self._schedule):
            questions = list[Question]()
            for path in paths:
                for turn in turns:
                    log = agent_log(protocol, path, turn.agent, number, stance=self._stance, key=self.key)
                    question = Question(turn, self.scenario.render(self.example, log, turn.agent, turn))
                    questions += [question] * number_of_answers(self.widths, turn.agent, number)
            if not questions:
                break
            answers = iter(await self.ask(questions))
            grown: list[tuple[Node, ...]] = []
            for path in paths:
                branches = [path]
                for turn in turns:
                    width = number_of_answers(self.widths, turn.agent, number)
                    given = [next(answers) for _ in range(width)]
                    branches = [
                        (*branch, self._add_node(branch, number, turn, answer))
                        for branch in branches
                        for answer in given
                    ]
                grown += branches
            paths = [path for path in (self._add_rewards(path, number, turns) for path in grown) if path]
        return EpisodeTree(
            protocol=protocol.name,
            agents=tuple(protocol.agents),
            channels=tuple(protocol.channels),
            max_rounds=protocol.max_rounds,
            truth=self._truth,
            stance=self._stance,
            key=self.key,
            bounds=dict(protocol.bounds),
            nodes=tuple(self._nodes),
        )

    def _verdict(self, name: str, value: Any) -> Verdict:
        for verdict in VERDICTS:
            if value == verdict:
                return verdict
        raise EpisodeError(
            f"the scenario's {name} of example '{self.example.id}' is {value!r}; it must be 0 (reject) or 1 "
            "(accept)"
        )

    def _add_node(self, path: tuple[Node, ...], number: int, turn: Turn, answer: FinalAnswer) -> Node:
        act = answer.act if isinstance(answer.act, Move) else Move()
        node = Node(
            id=len(self._nodes),
            parent=path[-1].id if path else None,
            round=number,
            agent=turn.agent,
            call=answer.call,
            text=answer.text,
            messages=act.messages,
            decision=act.decision,
            malformed=answer.act.reason if isinstance(answer.act, Malformed) else None,
            truncated=answer.truncated,
            rejected=answer.rejected,
            guess=None if turn.decide == "no" else self._guess(turn),
        )
        self._nodes.append(node)
        return node

    def _add_rewards(self, path: tuple[Node, ...], number: int, turns: Round) -> tuple[Node, ...]:
        """Add the round's rewards to the last node. Return the path, or an empty one if the play is over."""
        protocol, last = self.protocol, number == len(self._schedule) - 1
        answers = path[-len(turns) :]
        invalid = frozenset(answer.agent for answer in answers if answer.malformed is not None)
        cut_short = any(protocol.agents[agent].must_be_valid for agent in invalid)
        decision = next((answer.decision for answer in answers if answer.decision is not None), None)
        if protocol.forced is not None and (decision is not None or last):
            verdicts: Mapping[str, Verdict] = {"accept": ACCEPT, "reject": REJECT, "truth": self._truth}
            decision = float(sign(verdicts[protocol.forced]))
        outcome = Outcome(
            truth=self._truth,
            stance=self._stance,
            over=last or decision is not None or cut_short,
            decider=next((turn.agent for turn in turns if protocol.agents[turn.agent].may_decide), None),
            decision=decision,
            invalid=invalid,
            log=path,
        )
        where = f"protocol '{protocol.name}': in round {number}, "
        with user_code(EpisodeError, f"{where}the payoff"):
            earned = _PAYOFF.validate_python(protocol.payoff(outcome))
        for agent in earned:
            if agent not in protocol.agents:
                other = alternatives(agent, protocol.agents)
                raise EpisodeError(f"{where}there is a payoff for '{agent}', which is not an agent{other}")
        node = replace(path[-1], rewards={agent: value for agent, value in earned.items() if value})
        if outcome.over:
            undecided = "invalid" if cut_short else "undecided"
            ending = undecided if outcome.decision is None else "decided"
            node = replace(node, ending=ending, verdict=outcome.decision)
        self._nodes[node.id] = node
        path = (*path[:-1], node)
        if not outcome.over:
            return path
        for agent, (low, high) in protocol.bounds.items():
            total = math.fsum(node.rewards.get(agent, 0.0) for node in path)
            if not low - _TOLERANCE <= total <= high + _TOLERANCE:
                raise EpisodeError(
                    f"protocol '{protocol.name}': '{agent}' earned {total:g} in this play, outside its "
                    f"bounds {low:g} to {high:g}"
                )
        return ()
