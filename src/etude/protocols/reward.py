"""The payoffs of a protocol as a score."""

from __future__ import annotations

from collections import Counter

from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.protocols.tree import EpisodeTree
from etude.rewards.evaluator import scored


class ProtocolReward(Evaluator):
    """Scores a play by what one agent earned; where it branched, by the value of its root."""

    def __init__(self, agent: str) -> None:
        self.agent = agent

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. Raises RequestError when no protocol was played, or not with this agent."""
        tree = EpisodeTree.from_json(item.output_obj)
        endings = Counter(leaf.ending for leaf in tree.leaves())
        return scored(item, (tree.value(None, self.agent), dict(endings)))
