"""Evaluators of single plays: was the verdict right, was there one, and how did an agent behave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.component import EvaluatorConfig
from etude.config.nearest import alternatives
from etude.config.references import AgentRef
from etude.config.registry import register_evaluator
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.protocols.decision import NEITHER, UNDECIDED
from etude.protocols.tree import EpisodeTree
from etude.rewards.evaluator import scored, unscored
from etude.scenarios.measures import Conduct, accuracy, chance, conduct

if TYPE_CHECKING:
    from etude.config.builder import Builder


class PlayEvaluator(Evaluator):
    """Scores a play by a measure of its tree."""

    def __init__(self, measure: Callable[[EpisodeTree], float | None]) -> None:
        """`measure` gives None where there is nothing to measure: such a play has no score."""
        self._measure = measure

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. Raises RequestError when no protocol was played in it."""
        score = self._measure(EpisodeTree.from_json(item.output_obj))
        return unscored(item, "the agent had no turn in this play") if score is None else scored(item, score)


def share_of_answers(agent: str, count: Callable[[Conduct], int]) -> Callable[[EpisodeTree], float | None]:
    """A measure: of an agent's answers in a play, how many are counted."""

    def measure(tree: EpisodeTree) -> float | None:
        by_agent = conduct(tree)
        if agent not in by_agent:
            raise RequestError(f"the protocol has no agent '{agent}'" + alternatives(agent, by_agent))
        own = by_agent[agent]
        return count(own) / own.answers if own.answers else None

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
            yield PlayEvaluator(share_of_answers(agent, lambda own: own.asked_again))
        case TokenLimitProportionConfig(agent=agent):
            yield PlayEvaluator(share_of_answers(agent, lambda own: own.cut_off))
        case _:
            yield PlayEvaluator(accuracy)
