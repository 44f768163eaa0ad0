"""Transcripts: episodes of protocols as a person reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from etude.core.episode import EpisodeRecord
from etude.protocols.decision import WORDS, code_of
from etude.protocols.tree import EpisodeTree, Node
from etude.store.plain import jsonable


def transcript(record: EpisodeRecord, *, raw: bool = False, prompts: bool = False) -> dict[str, Any]:
    """An episode as JSON for a person.

    `turns` lists the messages in order, under `agent@channel`, and decisions under `agent.decision`; where
    agents were sampled more than once, `branches` go on from there. `raw` shows answers as the models wrote
    them, and `prompts` shows their prompts too. Raises RequestError when no protocol was played.
    """
    example = record.example
    about = {"episode": record.id, "example": example.id, "inputs": jsonable(dict(example.inputs))}
    if record.failure is not None:
        return about | {"failure": f"{record.failure.kind}: {record.failure.reason}"}
    tree = EpisodeTree.from_json(record.output)
    show = _Show(record, tree, raw=raw, prompts=prompts)
    return {
        **about,
        "protocol": tree.protocol,
        "truth": WORDS[tree.truth],
        "prover_stance": WORDS[tree.stance],
        **({"sides": {agent: WORDS[side] for agent, side in tree.sides.items()}} if tree.sides else {}),
        "rewards": {agent: tree.value(None, agent) for agent in tree.agents},
        **show.following(None),
    }


def as_yaml(transcript: Mapping[str, Any]) -> str:
    """A transcript as a YAML document. Text of several lines is a block, without spaces at their ends."""
    return yaml.dump(
        transcript, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=100
    )


def as_json(transcript: Mapping[str, Any]) -> str:
    """A transcript as a JSON object over several lines."""
    return json.dumps(transcript, indent=2, ensure_ascii=False) + "\n"


class _Show:
    """Shows the nodes of one tree."""

    def __init__(self, record: EpisodeRecord, tree: EpisodeTree, *, raw: bool, prompts: bool) -> None:
        self.tree = tree
        self.raw = raw
        self.prompts = prompts
        self.calls = {call.index: call for call in record.calls}

    def following(self, node: Node | None) -> dict[str, Any]:
        """The turns after a node until the next branching, and what comes then."""
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
                shown["verdict"] = _in_words(node.verdict)
            shown["rewards"] = {agent: self.tree.total(node, agent) for agent in self.tree.agents}
        return shown

    def branch(self, node: Node) -> dict[str, Any]:
        """A node and what follows it."""
        after = self.following(node)
        value = {agent: self.tree.value(node, agent) for agent in self.tree.agents}
        shown = {"value": value} if "branches" in after else {}
        return shown | {"turns": [self.turn(node), *after.pop("turns")]} | after

    def turn(self, node: Node) -> dict[str, Any]:
        """An answer by channel, after its thinking, with its decision, retries and faults."""
        shown: dict[str, Any] = {"round": node.round}
        call = self.calls.get(node.call)
        if call is not None and self.prompts:
            shown["prompt"] = [dict(message) for message in call.request.messages]
        if call is not None and call.completion is not None and call.completion.thinking:
            shown[f"{node.agent}.thinking"] = call.completion.thinking
        if self.raw or node.malformed is not None:
            shown[node.agent] = node.text
        else:
            shown |= {f"{node.agent}@{channel}": text for channel, text in node.messages.items()}
        if node.decision is not None:
            shown[f"{node.agent}.decision"] = _in_words(node.decision)
        if node.malformed is not None:
            shown[f"{node.agent}.malformed"] = node.malformed
        if node.rejected:
            shown[f"{node.agent}.retries"] = [rejected.reason for rejected in node.rejected]
        if node.truncated:
            shown[f"{node.agent}.truncated"] = True
        return shown


def _in_words(decision: float) -> str:
    return f"{WORDS[code_of(decision)]} ({decision:g})"


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A block cannot hold spaces at the end of a line; YAML would fall back to quotes for all of it.
    lines = "\n".join(line.rstrip() for line in text.split("\n")) if "\n" in text else text
    return dumper.represent_scalar("tag:yaml.org,2002:str", lines, style="|" if "\n" in lines else None)


_Dumper.add_representer(str, _represent_text)
