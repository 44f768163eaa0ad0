"""What one play of a protocol came to: its verdicts, and how the agents behaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from etude.protocols.decision import UNDECIDED, Verdict, code_of
from etude.protocols.tree import EpisodeTree, Node


@dataclass(frozen=True, slots=True)
class Ending:
    """One way that a play ended."""

    weight: float
    """How likely it was: all ways of a play together have 1."""
    code: int
    """0 reject, 1 accept, 2 no decision, 3 neither."""
    verdict: float | None
    """In [-1, 1]; None without a decision."""
    rounds: int

    def is_right(self, truth: Verdict) -> bool:
        """Whether the verdict is the right one. No decision is not, and neither is not."""
        return self.code == truth


def endings(tree: EpisodeTree) -> Iterator[Ending]:
    """The ways that a play ended; where agents were sampled k times, each answer had one chance in k."""
    weights: dict[int | None, float] = {None: 1.0}
    for node in tree.nodes:
        parent = None if node.parent is None else tree.nodes[node.parent]
        weights[node.id] = weights[node.parent] / len(tree.children(parent))
    for leaf in tree.leaves():
        code = code_of(leaf.verdict) if leaf.ending == "decided" else UNDECIDED
        yield Ending(weights[leaf.id], code, leaf.verdict, leaf.round + 1)


def chance(tree: EpisodeTree, of: Callable[[Ending], bool]) -> float:
    """How likely a play is to end so."""
    # Against rounding: thirds do not add up to 1.
    return min(1.0, math.fsum(ending.weight for ending in endings(tree) if of(ending)))


def accuracy(tree: EpisodeTree) -> float:
    """How likely the right verdict is."""
    return chance(tree, lambda ending: ending.is_right(tree.truth))


@dataclass(frozen=True, slots=True)
class Conduct:
    """The answers of an agent, each counted once."""

    answers: int = 0
    asked_again: int = 0
    """Those that took more than one attempt."""
    malformed: int = 0
    """Those that stayed unusable."""
    cut_off: int = 0
    """Those that reached the limit of tokens."""

    def plus(self, node: Node) -> Conduct:
        """With one answer more."""
        return Conduct(
            self.answers + 1,
            self.asked_again + bool(node.rejected),
            self.malformed + (node.malformed is not None),
            self.cut_off + node.truncated,
        )


def conduct(tree: EpisodeTree) -> Mapping[str, Conduct]:
    """How each agent behaved."""
    found = dict.fromkeys(tree.agents, Conduct())
    # An answer stands in the tree once for each of the others' answers in its round.
    for node in {node.call: node for node in tree.nodes}.values():
        found[node.agent] = found[node.agent].plus(node)
    return found
