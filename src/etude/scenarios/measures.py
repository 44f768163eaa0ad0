"""Evaluators of single plays: their verdicts, and how often agents were asked again or cut off."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.component import EvaluatorConfig
from etude.config.nearest import alternatives
from etude.config.references import AgentRef
from etude.config.registry import register_evaluator
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.protocols.decision import NEITHER, UNDECIDED, Verdict, code_of
from etude.protocols.tree import EpisodeTree, Node
from etude.rewards.evaluator import scored, unscored

if TYPE_CHECKING:
    from etude.config.builder import Builder


@dataclass(frozen=True, slots=True)
class Ending:
    """One way that a play ended."""

    weight: float
    """How likely it was: all ways of a play together have 1."""
    code: int
    """0 reject, 1 accept, 2 no decision, 3 neither."""

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
        yield Ending(weights[leaf.id], code)


def chance(tree: EpisodeTree, of: Callable[[Ending], bool]) -> float:
    """How likely a play is to end so."""
    # Against rounding: thirds do not add up to 1.
    return min(1.0, math.fsum(ending.weight for ending in endings(tree) if of(ending)))


def accuracy(tree: EpisodeTree) -> float:
    """How likely the right verdict is."""
    return chance(tree, lambda ending: ending.is_right(tree.truth))


class PlayEvaluator(Evaluator):
    """Scores a play by a measure of its tree."""

    bounds = (0.0, 1.0)

    def __init__(self, measure: Callable[[EpisodeTree], float | None]) -> None:
        """`measure` gives a number in [0, 1], or None where there is nothing to measure: such a play has no
        score."""
        self._measure = measure

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. Raises RequestError when no protocol was played in it."""
        score = self._measure(EpisodeTree.from_json(item.output_obj))
        return unscored(item, "the agent had no turn in this play") if score is None else scored(item, score)


def share_of_answers(agent: str, counts: Callable[[Node], bool]) -> Callable[[EpisodeTree], float | None]:
    """A measure: of an agent's answers in a play, the share that counts."""

    def measure(tree: EpisodeTree) -> float | None:
        if agent not in tree.agents:
            raise RequestError(f"the protocol has no agent '{agent}'" + alternatives(agent, tree.agents))
        # An answer stands in the tree once for each of the others' answers in its round.
        answers = {node.call: node for node in tree.nodes if node.agent == agent}.values()
        return sum(map(counts, answers)) / len(answers) if answers else None

    return measure


class VerdictAccuracyConfig(EvaluatorConfig, name="verdict_accuracy"):
    """1 when the verdict is right, otherwise 0; no decision is not right."""


class NoDecisionConfig(EvaluatorConfig, name="no_decision"):
    """1 when a play ends without a decision, otherwise 0."""


class NeitherConfig(EvaluatorConfig, name="neither_decision"):
    """1 when the verdict is neither accept nor reject, otherwise 0."""


class RetryProportionConfig(EvaluatorConfig, name="retry_proportion"):
    """The share of an agent's answers that had to be asked for again."""

    agent: AgentRef = Field(description="The agent, such as `verifier`.")


class TokenLimitProportionConfig(EvaluatorConfig, name="token_limit_proportion"):
    """The share of an agent's answers that were cut off at the limit of tokens."""

    agent: AgentRef = Field(description="The agent, such as `verifier`.")


@register_evaluator(config_type=VerdictAccuracyConfig)
@register_evaluator(config_type=NoDecisionConfig)
@register_evaluator(config_type=NeitherConfig)
@register_evaluator(config_type=RetryProportionConfig)
@register_evaluator(config_type=TokenLimitProportionConfig)
async def play_evaluator(config: Any, builder: Builder) -> AsyncIterator[Evaluator]:
    """The evaluator of a measure."""
    match config:
        case NoDecisionConfig():
            yield PlayEvaluator(lambda tree: chance(tree, lambda ending: ending.code == UNDECIDED))
        case NeitherConfig():
            yield PlayEvaluator(lambda tree: chance(tree, lambda ending: ending.code == NEITHER))
        case RetryProportionConfig(agent=agent):
            yield PlayEvaluator(share_of_answers(agent, lambda answer: bool(answer.rejected)))
        case TokenLimitProportionConfig(agent=agent):
            yield PlayEvaluator(share_of_answers(agent, lambda answer: answer.truncated))
        case _:
            yield PlayEvaluator(accuracy)
