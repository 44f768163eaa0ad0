"""The episode tree: every answer, verdict and reward of a play.

A node is one answer of one agent. When an agent was sampled more than once, its answers are siblings.
The other agents' answers in the same round are repeated below each sibling, so that siblings differ in
nothing else. A path from the root to a leaf is one course of the play.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError

from etude.core.errors import RequestError

Verdict: TypeAlias = Literal[0, 1]
"""0 is reject, 1 is accept."""

REJECT: Verdict = 0
ACCEPT: Verdict = 1

VERDICTS: tuple[Verdict, Verdict] = (REJECT, ACCEPT)
WORDS = {REJECT: "reject", ACCEPT: "accept"}
"""The word for each verdict."""


def sign(verdict: Verdict) -> int:
    """Return 1 for accept, -1 for reject."""
    return 1 if verdict == ACCEPT else -1


def shown_decision(decision: float) -> str:
    """Return a decision in words, with its number: `accept (0.5)`."""
    word = "accept" if decision > 0 else "reject" if decision < 0 else "neither"
    return f"{word} ({decision:g})"


@dataclass(frozen=True, slots=True)
class Rejected:
    """An earlier, malformed answer to the same prompt, which was retried."""

    call: int
    reason: str


@dataclass(frozen=True, slots=True)
class Node:
    """One answer."""

    id: int
    """The index in `EpisodeTree.nodes`. Parents come before their children."""
    parent: int | None
    """The parent's index; None for the first answer of a play."""
    round: int
    """The round, counted from 0."""
    agent: str
    call: int
    """The index of the model call in the episode. Copies of one answer below several siblings share it."""
    text: str
    """The answer as the model wrote it."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """The messages of the answer, by channel."""
    decision: float | None = None
    """From -1 (reject) to 1 (accept); None when the answer did not decide."""
    malformed: str | None = None
    """The reason why the answer is ignored, when all attempts were malformed."""
    truncated: bool = False
    """Whether the answer was cut off at the token limit."""
    rejected: tuple[Rejected, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Each agent's reward for the round that this answer completes, without zeros."""
    ending: str | None = None
    """The ending of a leaf: `decided`, `undecided` when the rounds ran out, or `invalid`."""
    verdict: float | None = None
    """The verdict of a decided leaf, in [-1, 1]. The protocol may have forced it."""
    guess: str | None = None
    """An answer that the scenario parses as the right verdict, in a turn that may decide."""


@dataclass(frozen=True)
class EpisodeTree:
    """All answers of one play, with the data needed to interpret them."""

    protocol: str
    agents: tuple[str, ...]
    channels: tuple[str, ...]
    max_rounds: int
    truth: Verdict
    stance: Verdict
    key: int
    """The seed for the play's draws: the schedule, the stance and the order of channels."""
    bounds: Mapping[str, tuple[float, float]]
    nodes: tuple[Node, ...]

    def children(self, node: Node | None = None) -> Sequence[Node]:
        """Return the answers that followed a node, or the first answers of the play."""
        return self._children.get(None if node is None else node.id, ())

    def leaves(self) -> Iterator[Node]:
        """Return the last answer of each path."""
        return (node for node in self.nodes if node.id not in self._children)

    def path(self, node: Node) -> list[Node]:
        """Return the answers from the first one to `node`."""
        path = [node]
        while path[-1].parent is not None:
            path.append(self.nodes[path[-1].parent])
        return path[::-1]

    def value(self, node: Node | None, agent: str) -> float:
        """Return a node's value for an agent: the node's reward plus the mean of its children's values.

        The mean is over the children, not over the leaves: a child that ends the play has the same weight as
        one that branches further. The node None is the root, and has the value of the whole play. Raises
        RequestError for an unknown agent.
        """
        values = self.values(agent)
        return _mean([values[child.id] for child in self.children()]) if node is None else values[node.id]

    def values(self, agent: str) -> Sequence[float]:
        """Return the value of every node for an agent, by node id. Raises as `value`."""
        if agent not in self.agents:
            raise RequestError(
                f"the protocol '{self.protocol}' has no agent '{agent}'; agents: {', '.join(self.agents)}"
            )
        return self._values[agent]

    def answers(self, agent: str | None = None) -> Iterator[tuple[str, dict[int, list[Node]]]]:
        """Yield each prompt's agent and the answers to it, of one agent or of all, in the order of the play.

        An answer is the index of its call, with its copies: one below each combination of earlier answers in
        its round. The others' answers up to this round are the same for all answers to a prompt.
        """
        by_prompt: dict[tuple[int | None, str], dict[int, list[Node]]] = {}
        before: list[int | None] = []
        for node in self.nodes:
            # All agents of a round have the same information: the answers of earlier rounds.
            parent = None if node.parent is None else self.nodes[node.parent]
            same_round = parent is not None and parent.round == node.round
            before.append(before[parent.id] if parent is not None and same_round else node.parent)
            if agent in (None, node.agent):
                answers = by_prompt.setdefault((before[node.id], node.agent), {})
                answers.setdefault(node.call, []).append(node)
        yield from ((name, answers) for (_, name), answers in by_prompt.items())

    def to_json(self) -> dict[str, Any]:
        """Return the tree as JSON, without fields that have their default."""
        tree: dict[str, Any] = _TREE.dump_python(self, mode="json", exclude_defaults=True)
        return tree

    @classmethod
    def from_json(cls, data: Any) -> EpisodeTree:
        """Load the tree from the output of `to_json`. Raises RequestError if the data is not such a tree."""
        try:
            return _TREE.validate_python(data)
        except ValidationError as error:
            raise RequestError(
                "the episode's output is not an episode tree; did the episode play a protocol?"
            ) from error

    @cached_property
    def _children(self) -> Mapping[int | None, list[Node]]:
        children: dict[int | None, list[Node]] = {}
        for node in self.nodes:
            children.setdefault(node.parent, []).append(node)
        return children

    @cached_property
    def _values(self) -> Mapping[str, Sequence[float]]:
        by_agent = {agent: [node.rewards.get(agent, 0.0) for node in self.nodes] for agent in self.agents}
        for node in reversed(self.nodes):
            if children := self.children(node):
                for values in by_agent.values():
                    values[node.id] += _mean([values[child.id] for child in children])
        return by_agent


_TREE = TypeAdapter(EpisodeTree)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
