"""Plays of protocols: the tree of answers with their values, and who heard what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.core.episode import EpisodeRecord
from etude.core.message import text_of
from etude.protocols.decision import WORDS, code_of
from etude.protocols.tree import EpisodeTree, Node


@dataclass(frozen=True, slots=True)
class Said:
    """A message of an agent on a channel."""

    channel: str
    text: str
    heard_by: tuple[str, ...]
    """The other agents in whose prompts it stands."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A node of the tree, with what followed it."""

    node: Node
    said: tuple[Said, ...]
    values: Mapping[str, float]
    """By agent: what it earned from here on, on average over the branches."""
    decision: str
    thinking: str
    following: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """A play as a page shows it."""

    protocol: str
    truth: str
    stance: str
    values: Mapping[str, float]
    """By agent: its earnings in the whole play."""
    answers: tuple[Answer, ...]


def shown_play(record: EpisodeRecord) -> Shown:
    """The play of an episode. Raises RequestError when its output is no tree."""
    tree = EpisodeTree.from_json(record.output)
    calls = {call.index: call for call in record.calls}
    prompts: dict[str, str] = {}
    for node in tree.nodes:
        if (call := calls.get(node.call)) is not None:
            read = "\n".join(text_of(message) for message in call.request.messages)
            prompts[node.agent] = prompts.get(node.agent, "") + read

    def heard(node: Node, text: str) -> tuple[str, ...]:
        others = ((agent, read) for agent, read in prompts.items() if agent != node.agent)
        return tuple(agent for agent, read in others if text.strip() in read)

    def answer(node: Node) -> Answer:
        call = calls.get(node.call)
        said = tuple(Said(channel, text, heard(node, text)) for channel, text in node.messages.items())
        return Answer(
            node,
            said,
            {agent: tree.value(node, agent) for agent in tree.agents},
            "" if node.decision is None else f"{WORDS[code_of(node.decision)]} ({node.decision:g})",
            "" if call is None or call.completion is None else call.completion.thinking,
            tuple(map(answer, tree.children(node))),
        )

    return Shown(
        tree.protocol,
        WORDS[tree.truth],
        WORDS[tree.stance],
        {agent: tree.value(None, agent) for agent in tree.agents},
        tuple(map(answer, tree.children())),
    )
