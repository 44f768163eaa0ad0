"""Plays of protocols, and their episodes scored, for tests of what is built from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.algorithms.episodes import ScoredEpisode, by_agent, without_retries
from etude.algorithms.samples import branches_of
from etude.core.episode import EpisodeRecord
from etude.protocols import EpisodeTree, Protocol
from etude.protocols.tree import Node
from etude.store.journal import Journal
from tests.protocols.games import play_record
from tests.support import ScriptedEngine

EVERY = ("*",)


async def played(folder: Path, protocol: Protocol, answers: Any, **settings: Any) -> EpisodeRecord:
    """The episode of a play in which models answer in that order, or as a function says."""
    engine = answers if isinstance(answers, ScriptedEngine) else ScriptedEngine(answers)
    with Journal(folder / f"{settings.get('generation', 0)}.db") as journal:
        record = await play_record(protocol, engine, journal, **settings)
    assert record.failure is None, record.failure
    return record


def scored(record: EpisodeRecord, reward: float = 0.0) -> ScoredEpisode:
    """The episode as a collection has it."""
    return ScoredEpisode(record, reward, tuple(branches_of(without_retries(record), EVERY, "policy")))


def part_of(agent: str, *records: EpisodeRecord) -> list[ScoredEpisode]:
    """One agent's part of the episodes."""
    groups = by_agent([scored(record) for record in records])
    return next((group for group in groups if group[0].agent == agent), [])


def expected_value(tree: EpisodeTree, node: Node, agent: str) -> float:
    """The agent's mean payoff from the node on when a child is drawn evenly again and again.

    By listing all ways to the end: the probability of each, times what is earned on it.
    """
    ways: list[tuple[float, list[Node]]] = [(1.0, [node])]
    ended: list[tuple[float, list[Node]]] = []
    while ways:
        probability, path = ways.pop()
        children = [one for one in tree.nodes if one.parent == path[-1].id]
        ways += [(probability / len(children), [*path, child]) for child in children]
        if not children:
            ended.append((probability, path))
    return sum(probability * sum(one.rewards.get(agent, 0.0) for one in path) for probability, path in ended)
