"""Rows: the ways that plays went, one by one."""

from __future__ import annotations

from dataclasses import dataclass

from etude.core.episode import EpisodeRecord
from etude.protocols.tree import EpisodeTree, Node


@dataclass(frozen=True, slots=True)
class Row:
    """One way that a play went."""

    record: EpisodeRecord
    tree: EpisodeTree
    path: tuple[Node, ...]

    @property
    def played(self) -> int:
        """Rounds until the end."""
        return self.path[-1].round + 1

    def round(self, number: int) -> list[Node]:
        """The answers of a round."""
        return [node for node in self.path if node.round == number]
