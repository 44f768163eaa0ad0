"""Growing an episode tree: round by round, all branches at once."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.core.errors import EpisodeError
from etude.core.example import Example
from etude.protocols.act import Act, Malformed
from etude.protocols.asking import Question, Said
from etude.protocols.decision import VERDICTS, Verdict
from etude.protocols.log import log_of
from etude.protocols.outcome import Outcome, resolve
from etude.protocols.protocol import Protocol
from etude.protocols.scenario import Scenario
from etude.protocols.tree import EpisodeTree, Node
from etude.protocols.turn import Round
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
    """Seed of the play's own draws: the schedule and the order of channels."""

    @property
    def truth(self) -> Verdict:
        """The right verdict. Raises EpisodeError when the scenario has none."""
        return _verdict("truth", self.scenario.truth(self.example), self.example)

    @property
    def stance(self) -> Verdict:
        """The example's stance. Raises EpisodeError when the scenario has none."""
        return _verdict("stance", self.scenario.stance(self.example), self.example)


class Answers(typing.Protocol):
    """Whatever answers the turns of a play: the agents' models, or a script."""

    async def ask(self, questions: Sequence[Question]) -> list[Said]:
        """The answers to the questions of a round, in their order."""


async def grow(play: Play, asker: Answers) -> EpisodeTree:
    """Play a protocol to its end, along all branches.

    All branches take their round together. So the order of the questions does not depend on which model
    answers first, and a play that is taken up again asks what it had asked. Raises what `asker` raises.
    """
    protocol, truth, stance = play.protocol, play.truth, play.stance
    rounds = protocol.rounds(play.key)
    nodes: list[Node] = []
    paths: list[Path] = [()]
    for number, turns in enumerate(rounds):
        questions = [
            question for path in paths for question in _questions(play, rounds, number, path, stance)
        ]
        answers = iter(await asker.ask(questions))
        grown = [new for path in paths for new in _branches(play.widths, number, turns, path, answers, nodes)]
        last = number == len(rounds) - 1
        paths = []
        for path in grown:
            outcome = _outcome(protocol, turns, path, last=last, truth=truth, stance=stance)
            node = nodes[path[-1].id] = _with_outcome(protocol, path[-1], outcome)
            if not outcome.over:
                paths.append((*path[:-1], node))
        if not paths:
            break
    return EpisodeTree(
        protocol=protocol.name,
        agents=tuple(protocol.agents),
        channels=tuple(protocol.channels),
        max_rounds=protocol.max_rounds,
        truth=truth,
        stance=stance,
        key=play.key,
        bounds=dict(protocol.bounds),
        nodes=tuple(nodes),
    )


def _questions(
    play: Play, rounds: Sequence[Round], number: int, path: Path, stance: Verdict
) -> Iterator[Question]:
    """What the agents of a round are asked after a path, once for each answer that is wanted."""
    for turn in rounds[number]:
        log = log_of(play.protocol, rounds, path, turn.agent, number, stance=stance, key=play.key)
        question = Question(turn, play.scenario.render(play.example, log, turn.agent, turn))
        for _ in range(play.widths.at(turn.agent, number)):
            yield question


def _branches(
    widths: Widths, number: int, turns: Round, path: Path, answers: Iterator[Said], nodes: list[Node]
) -> list[Path]:
    """The path with each combination of the answers of a round; new nodes are added to `nodes`."""
    branches = [path]
    for turn in turns:
        said = [next(answers) for _ in range(widths.at(turn.agent, number))]
        extended: list[Path] = []
        for branch in branches:
            for one in said:
                nodes.append(_node(len(nodes), branch, number, turn.agent, one))
                extended.append((*branch, nodes[-1]))
        branches = extended
    return branches


def _node(index: int, path: Path, number: int, agent: str, said: Said) -> Node:
    act = said.act if isinstance(said.act, Act) else Act()
    return Node(
        id=index,
        parent=path[-1].id if path else None,
        round=number,
        agent=agent,
        call=said.call,
        text=said.text,
        messages=dict(act.messages),
        decision=act.decision,
        malformed=said.act.reason if isinstance(said.act, Malformed) else None,
        truncated=said.truncated,
        rejected=said.rejected,
    )


def _outcome(
    protocol: Protocol, turns: Round, path: Path, *, last: bool, truth: Verdict, stance: Verdict
) -> Outcome:
    answers = path[-len(turns) :]
    return resolve(
        protocol,
        turns,
        last=last,
        truth=truth,
        stance=stance,
        decision=next((node.decision for node in answers if node.decision is not None), None),
        invalid=frozenset(node.agent for node in answers if node.malformed is not None),
    )


def _with_outcome(protocol: Protocol, node: Node, outcome: Outcome) -> Node:
    """The node that completes a round, with what the round came to."""
    earned = {agent: float(value) for agent, value in protocol.payoff(outcome).items() if value}
    if not outcome.over:
        return replace(node, rewards=earned)
    decided = outcome.decision is not None
    cut_short = any(protocol.agents[agent].must_be_valid for agent in outcome.invalid)
    ending = "decided" if decided else "invalid" if cut_short else "undecided"
    return replace(node, rewards=earned, ending=ending, verdict=outcome.decision)


def _verdict(what: str, found: Any, example: Example) -> Verdict:
    for verdict in VERDICTS:
        if found == verdict:
            return verdict
    raise EpisodeError(
        f"the scenario's {what} of example '{example.id}' is {found!r}; it must be 0 (reject) or 1 (accept)"
    )
