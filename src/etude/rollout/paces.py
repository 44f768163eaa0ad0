"""How long episodes take on each machine that plays them, and which machines are slow."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_RECENT = 100
_FEWEST = 5
"""Episodes of a node, below which its median says little."""
_SLOW = 1.5
"""Times the median of the other nodes, from which on a node counts as slow."""


@dataclass(slots=True)
class _Node:
    episodes: int = 0
    seconds: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


@dataclass(frozen=True, slots=True)
class Pace:
    """The episodes that one node has played."""

    node: str
    episodes: int
    seconds: float
    """Of all of them together."""
    median: float
    """Seconds of one, over the last hundred."""
    others: float | None
    """The median of that over all other nodes; None where these have played too few."""

    @property
    def is_slow(self) -> bool:
        """Whether its episodes take much longer than those of the other nodes."""
        return self.others is not None and self.episodes >= _FEWEST and self.median > _SLOW * self.others


class Paces:
    """The seconds of played episodes, by node."""

    def __init__(self) -> None:
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)

    def note(self, node: str, seconds: float) -> None:
        """An episode was played on a node."""
        played = self._nodes[node]
        played.episodes += 1
        played.seconds += seconds
        played.recent.append(seconds)

    def by_node(self) -> list[Pace]:
        """The nodes that have played episodes, by name."""
        medians = {name: statistics.median(node.recent) for name, node in self._nodes.items()}
        ordered = sorted(medians.values())
        recent = sum(len(node.recent) for node in self._nodes.values())
        return [
            Pace(
                name,
                node.episodes,
                node.seconds,
                medians[name],
                _median_without(ordered, medians[name]) if recent - len(node.recent) >= _FEWEST else None,
            )
            for name, node in sorted(self._nodes.items())
        ]


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of two or more sorted values, one that equals `value` left out."""
    at, rest = bisect_left(ordered, value), len(ordered) - 1
    middle = ((rest - 1) // 2, rest // 2)
    return statistics.fmean(ordered[each + (each >= at)] for each in middle)
