"""The episode tree: every answer and reward of a play, and its transcript for a person.

A node is one answer of one agent. When an agent was sampled more than once, its answers are siblings.
The other agents' answers in the same round are repeated below each sibling, so that siblings differ in
nothing else. A path from the root to a leaf is one course of the play.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.json_text import jsonable
from etude.protocols.decision import WORDS, Verdict, shown_decision


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

    def total(self, leaf: Node, agent: str) -> float:
        """Return the sum of an agent's rewards on the path to a leaf."""
        return math.fsum(node.rewards.get(agent, 0.0) for node in self.path(leaf))

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
        """Load the tree from the output of `to_json`. Raises RequestError if the data is no such tree."""
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


def transcript(record: EpisodeRecord) -> dict[str, Any]:
    """Return an episode as JSON for a person.

    `turns` lists the messages in order, under `agent@channel`, and decisions under `agent.decision`. Where
    an agent was sampled more than once, `branches` continue. Raises RequestError if no protocol was played.
    """
    example = record.example
    about = {"episode": record.id, "example": example.id, "inputs": jsonable(dict(example.inputs))}
    if record.failure is not None:
        return about | {"failure": f"{record.failure.kind}: {record.failure.reason}"}
    tree = EpisodeTree.from_json(record.output)
    show = _Show(record, tree)
    return {
        **about,
        "protocol": tree.protocol,
        "truth": WORDS[tree.truth],
        "prover_stance": WORDS[tree.stance],
        "rewards": {agent: tree.value(None, agent) for agent in tree.agents},
        **show.following(None),
    }


def as_yaml(transcript: Mapping[str, Any]) -> str:
    """Return a transcript as a YAML document. Multi-line text is a block without trailing spaces."""
    return yaml.dump(
        transcript, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=100
    )


class _Show:
    """The renderer of one tree's nodes for a transcript."""

    def __init__(self, record: EpisodeRecord, tree: EpisodeTree) -> None:
        self.tree = tree
        self.calls = {call.index: call for call in record.calls}

    def following(self, node: Node | None) -> dict[str, Any]:
        """Return the turns after a node up to the next branching, then the branches or the ending."""
        turns: list[dict[str, Any]] = []
        children = self.tree.children(node)
        while len(children) == 1:
            node = children[0]
            turns.append(self.turn(node))
            children = self.tree.children(node)
        shown: dict[str, Any] = {"turns": turns}
        if children:
            shown["branches"] = [self.branch(child) for child in children]
        elif node is not None:
            shown["ending"] = node.ending
            if node.verdict is not None and node.verdict != node.decision:
                shown["verdict"] = shown_decision(node.verdict)
            shown["rewards"] = {agent: self.tree.total(node, agent) for agent in self.tree.agents}
        return shown

    def branch(self, node: Node) -> dict[str, Any]:
        """Return a node, and the turns and branches after it."""
        after = self.following(node)
        value = {agent: self.tree.value(node, agent) for agent in self.tree.agents}
        shown = {"value": value} if "branches" in after else {}
        return shown | {"turns": [self.turn(node), *after.pop("turns")]} | after

    def turn(self, node: Node) -> dict[str, Any]:
        """Return an answer's thinking, messages by channel, decision, retries and faults."""
        shown: dict[str, Any] = {"round": node.round}
        call = self.calls.get(node.call)
        if call is not None and call.completion is not None and call.completion.thinking:
            shown[f"{node.agent}.thinking"] = call.completion.thinking
        if node.malformed is not None:
            shown[node.agent] = node.text
        else:
            shown |= {f"{node.agent}@{channel}": text for channel, text in node.messages.items()}
        if node.decision is not None:
            shown[f"{node.agent}.decision"] = shown_decision(node.decision)
        if node.malformed is not None:
            shown[f"{node.agent}.malformed"] = node.malformed
        if node.rejected:
            shown[f"{node.agent}.retries"] = [rejected.reason for rejected in node.rejected]
        if node.truncated:
            shown[f"{node.agent}.truncated"] = True
        return shown


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line text as a block."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A YAML block cannot hold trailing spaces: with them, the dumper would quote the whole text.
    lines = "\n".join(line.rstrip() for line in text.split("\n")) if "\n" in text else text
    return dumper.represent_scalar("tag:yaml.org,2002:str", lines, style="|" if "\n" in lines else None)


_Dumper.add_representer(str, _represent_text)
