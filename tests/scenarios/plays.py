"""Plays made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.protocols import EpisodeTree
from etude.protocols.decision import Verdict
from etude.protocols.tree import Node, Rejected


def tree(
    nodes: Sequence[Node], truth: Verdict = 1, agents: Sequence[str] = ("prover", "verifier")
) -> EpisodeTree:
    """A tree of these answers."""
    return EpisodeTree(
        protocol="nip",
        agents=tuple(agents),
        channels=("main",),
        max_rounds=9,
        truth=truth,
        stance=1,
        key=0,
        bounds=dict.fromkeys(agents, (-1.0, 1.0)),
        nodes=tuple(nodes),
    )


def verdict_node(number: int, parent: int | None, verdict: float | None, **fields: Any) -> Node:
    """An answer of the verifier that ends a play."""
    return Node(
        **{
            "id": number,
            "parent": parent,
            "round": 1,
            "agent": "verifier",
            "call": number,
            "text": "",
            "decision": verdict,
            "ending": "undecided" if verdict is None else "decided",
            "verdict": verdict,
        }
        | fields
    )


def simple(
    verdict: float | None, truth: Verdict = 1, *, retries: int = 0, cut_off: bool = False
) -> EpisodeTree:
    """The prover says something and the verifier decides; it earns 1 or -1."""
    earned = 0.0 if verdict is None else verdict * (1 if truth else -1)
    said = Node(0, None, 0, "prover", 0, "Trust me.", {"main": "Trust me."}, truncated=cut_off)
    rejected = tuple(Rejected(10 + number, "no decision") for number in range(retries))
    return tree([said, verdict_node(1, 0, verdict, rejected=rejected, rewards={"verifier": earned})], truth)
