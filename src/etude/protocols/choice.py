"""Choices: the places in an episode tree where an agent answered, with all its answers there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from etude.protocols.tree import EpisodeTree, Node


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers that an agent gave to one prompt."""

    call: int
    """Index of the model call within the episode."""
    nodes: tuple[Node, ...]
    """Where the answer stands in the tree: once below each answer of the others in its round."""
    value: float
    """What it is worth to the agent: the mean value of its nodes."""

    @property
    def node(self) -> Node:
        """The first of the nodes; they have the text, the messages and the decision in common."""
        return self.nodes[0]


@dataclass(frozen=True, slots=True)
class Choice:
    """One prompt to one agent, and its answers. They differ in nothing else: all that the others said
    before, and at the same time, is the same for each."""

    agent: str
    round: int
    answers: tuple[Answer, ...]


def choices(tree: EpisodeTree, agent: str | None = None) -> Iterator[Choice]:
    """All choices of a tree, in the order of the play; those of one agent, or of all."""
    places: dict[tuple[int | None, str], dict[int, list[Node]]] = {}
    before: list[int | None] = []
    for node in tree.nodes:
        # Agents of one round know the same: what was said until the round before.
        parent = None if node.parent is None else tree.nodes[node.parent]
        same_round = parent is not None and parent.round == node.round
        before.append(before[parent.id] if parent is not None and same_round else node.parent)
        if agent in (None, node.agent):
            answers = places.setdefault((before[node.id], node.agent), {})
            answers.setdefault(node.call, []).append(node)
    for (_, name), answers in places.items():
        values = tree.values(name)
        yield Choice(
            agent=name,
            round=next(iter(answers.values()))[0].round,
            answers=tuple(
                Answer(call, tuple(nodes), math.fsum(values[node.id] for node in nodes) / len(nodes))
                for call, nodes in answers.items()
            ),
        )
