"""Plays of protocols: the tree of answers with their values, and who heard what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etude.core.episode import EpisodeRecord
from etude.core.message import text_of
from etude.protocols.decision import WORDS, code_of
from etude.protocols.tree import EpisodeTree, Node

_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Said:
    """A message of an agent on a channel."""

    channel: str
    text: str
    heard_by: tuple[str, ...]
    """The other agents in whose later prompts it stands."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A node of the tree, with what followed it."""

    node: Node
    said: tuple[Said, ...]
    values: Mapping[str, float]
    """By agent: what it earned from here on, on average over the branches."""
    gain: float | None
    """By how much it was worth more to its agent than its siblings, on average; None without siblings."""
    decision: str
    thinking: str
    following: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Play:
    """A play as a page shows it."""

    protocol: str
    truth: str
    stance: str
    values: Mapping[str, float]
    """By agent: its earnings in the whole play."""
    agents: Mapping[str, int]
    """The number of each agent's colour, from 1."""
    ways: int
    """In how many ways the play went."""
    size: int
    """Answers in the tree."""
    answers: tuple[Answer, ...]


def shown_play(record: EpisodeRecord) -> Play:
    """The play of an episode. Raises RequestError when its output is no tree."""
    tree = EpisodeTree.from_json(record.output)
    calls = {call.index: call for call in record.calls}
    prompts = {
        index: "\n".join(text_of(message) for message in call.request.messages)
        for index, call in calls.items()
    }

    def heard(node: Node, text: str) -> tuple[str, ...]:
        heard_by = {
            after.agent for after in _below(tree, node) if text.strip() in prompts.get(after.call, "")
        }
        return tuple(agent for agent in tree.agents if agent in heard_by - {node.agent})

    def answer(node: Node) -> Answer:
        call = calls.get(node.call)
        said = tuple(Said(channel, text, heard(node, text)) for channel, text in node.messages.items())
        return Answer(
            node,
            said,
            {agent: tree.value(node, agent) for agent in tree.agents},
            _gain(tree, node),
            "" if node.decision is None else f"{WORDS[code_of(node.decision)]} ({node.decision:g})",
            "" if call is None or call.completion is None else call.completion.thinking,
            tuple(map(answer, tree.children(node))),
        )

    return Play(
        tree.protocol,
        WORDS[tree.truth],
        WORDS[tree.stance],
        {agent: tree.value(None, agent) for agent in tree.agents},
        {agent: at % _COLOURS + 1 for at, agent in enumerate(tree.agents)},
        sum(1 for _ in tree.leaves()),
        len(tree.nodes),
        tuple(map(answer, tree.children())),
    )


def _below(tree: EpisodeTree, node: Node) -> Iterator[Node]:
    """All answers that came after one."""
    for child in tree.children(node):
        yield child
        yield from _below(tree, child)


def _gain(tree: EpisodeTree, node: Node) -> float | None:
    parent = None if node.parent is None else tree.nodes[node.parent]
    others = [tree.value(each, node.agent) for each in tree.children(parent) if each.id != node.id]
    return tree.value(node, node.agent) - sum(others) / len(others) if others else None
