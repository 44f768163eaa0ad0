"""The episode tree: every answer of a play, and what the play was worth.

A node is one answer of one agent. Where an agent was sampled more than once, its answers are siblings;
the others' answers in the same round are the same below each of them, so that siblings differ in
nothing else. A path from the root to a leaf is one way that the play went.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from etude.core.errors import RequestError
from etude.protocols.decision import Verdict


@dataclass(frozen=True, slots=True)
class Rejected:
    """An earlier answer to the same prompt, that was malformed and asked for again."""

    call: int
    reason: str


@dataclass(frozen=True, slots=True)
class Node:
    """One answer."""

    id: int
    """Its place in `EpisodeTree.nodes`; parents come before their children."""
    parent: int | None
    """None at the first answer of a play."""
    round: int
    """From 0."""
    agent: str
    call: int
    """Index of the model call within the episode. Answers that were sampled once and used under several
    siblings share it."""
    text: str
    """The answer as the model wrote it."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """What it said, by channel."""
    decision: float | None = None
    """In [-1, 1]; None when it did not decide."""
    malformed: str | None = None
    """Why it counts for nothing, when no attempt was usable."""
    truncated: bool = False
    """Whether it was cut off at the limit of tokens."""
    rejected: tuple[Rejected, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What each agent earned with the round that this answer completes; those who earned nothing are
    left out."""
    ending: str | None = None
    """At a leaf: `decided`, `undecided` when the rounds ran out, or `invalid`."""
    verdict: float | None = None
    """At a leaf that is decided: what counted, in [-1, 1]; of a vote, what the ballots came to."""
    guess: str | None = None
    """In a turn that may decide: the answer that gives the right verdict, as the scenario reads it."""


@dataclass(frozen=True)
class EpisodeTree:
    """All answers of one play, with what is needed to make sense of them."""

    protocol: str
    agents: tuple[str, ...]
    channels: tuple[str, ...]
    max_rounds: int
    truth: Verdict
    stance: Verdict
    key: int
    """Seed of the play's own draws: the schedule, the sides and the order of channels."""
    bounds: Mapping[str, tuple[float, float]]
    nodes: tuple[Node, ...]
    sides: Mapping[str, Verdict] = field(default_factory=dict)
    """The verdict that each agent argued for, where a coin drew it; empty in other protocols."""

    def children(self, node: Node | None = None) -> Sequence[Node]:
        """The answers that followed a node, or the first answers."""
        return self._children.get(None if node is None else node.id, ())

    def leaves(self) -> Iterator[Node]:
        """The last answers, one for each way that the play went."""
        return (node for node in self.nodes if node.id not in self._children)

    def path(self, node: Node) -> list[Node]:
        """The answers from the first to `node`."""
        found = [node]
        while found[-1].parent is not None:
            found.append(self.nodes[found[-1].parent])
        return found[::-1]

    def total(self, leaf: Node, agent: str) -> float:
        """What an agent earned in all on the way to a leaf."""
        return math.fsum(node.rewards.get(agent, 0.0) for node in self.path(leaf))

    def value(self, node: Node | None, agent: str) -> float:
        """What an agent earns from a node on: with the node, and on average over what follows it.

        The average is over the children, not over the leaves: a play that ends early counts as much as
        one that branches on. None is the root: the value of the whole play. Raises RequestError for an
        agent that is not there.
        """
        values = self.values(agent)
        return _mean([values[child.id] for child in self.children()]) if node is None else values[node.id]

    def values(self, agent: str) -> Sequence[float]:
        """The value of every node for an agent, by id. Raises RequestError as `value`."""
        if agent not in self.agents:
            raise RequestError(
                f"the protocol '{self.protocol}' has no agent '{agent}'; agents: {', '.join(self.agents)}"
            )
        if agent not in self._values:
            values = [node.rewards.get(agent, 0.0) for node in self.nodes]
            for node in reversed(self.nodes):
                following = self._children.get(node.id)
                if following:
                    values[node.id] += _mean([values[child.id] for child in following])
            self._values[agent] = values
        return self._values[agent]

    def to_json(self) -> dict[str, Any]:
        """The tree as JSON; what has its default is left out of the nodes."""
        return {
            "protocol": self.protocol,
            "agents": list(self.agents),
            "channels": list(self.channels),
            "max_rounds": self.max_rounds,
            "truth": self.truth,
            "stance": self.stance,
            "key": self.key,
            "bounds": {agent: list(ends) for agent, ends in self.bounds.items()},
            "sides": dict(self.sides),
            "nodes": [_node_to_json(node) for node in self.nodes],
        }

    @classmethod
    def from_json(cls, data: Any) -> EpisodeTree:
        """The tree that `to_json` made `data` of. Raises RequestError when it is no such tree."""
        if not isinstance(data, Mapping) or not {"protocol", "nodes", "bounds"} <= data.keys():
            raise RequestError("the episode's output is not an episode tree; was a protocol played in it?")
        return cls(
            protocol=data["protocol"],
            agents=tuple(data["agents"]),
            channels=tuple(data["channels"]),
            max_rounds=data["max_rounds"],
            truth=data["truth"],
            stance=data["stance"],
            key=data["key"],
            bounds={agent: (low, high) for agent, (low, high) in data["bounds"].items()},
            nodes=tuple(_node_from_json(node, index) for index, node in enumerate(data["nodes"])),
            sides=dict(data.get("sides", {})),
        )

    @cached_property
    def _children(self) -> Mapping[int | None, list[Node]]:
        found: dict[int | None, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.parent, []).append(node)
        return found

    @cached_property
    def _values(self) -> dict[str, Sequence[float]]:
        return {}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


_WITH_DEFAULT = ("messages", "decision", "malformed", "truncated", "rewards", "ending", "verdict", "guess")


def _node_to_json(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {
        "parent": node.parent,
        "round": node.round,
        "agent": node.agent,
        "call": node.call,
        "text": node.text,
    }
    for name in _WITH_DEFAULT:
        value = getattr(node, name)
        if isinstance(value, Mapping):
            data |= {name: dict(value)} if value else {}
        elif value is not None and value is not False:
            data[name] = value
    if node.rejected:
        data["rejected"] = [[one.call, one.reason] for one in node.rejected]
    return data


def _node_from_json(data: Mapping[str, Any], index: int) -> Node:
    rejected = tuple(Rejected(call, reason) for call, reason in data.get("rejected", ()))
    return Node(
        id=index, **{name: value for name, value in data.items() if name != "rejected"}, rejected=rejected
    )
