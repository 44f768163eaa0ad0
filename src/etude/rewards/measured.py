"""The evaluator that reads a score which was measured inside of the run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from etude.config.component import EvaluatorConfig
from etude.config.references import AgentRef
from etude.config.registry import register_evaluator
from etude.core.episode import measured
from etude.core.evaluation import EvalInputItem, EvalOutputItem, ScoreBounds
from etude.core.interfaces import Evaluator
from etude.core.stats import Bounds
from etude.rewards.evaluator import scored, unscored

if TYPE_CHECKING:
    from etude.config.builder import Builder


class MeasuredEvaluator(Evaluator):
    """Gives an episode the score that it recorded of itself with `episode.score(name, …, agent=…)`.

    An episode without it is left out and counted, like any whose evaluator failed.
    """

    def __init__(self, name: str, agent: str | None = None, bounds: Bounds | None = None) -> None:
        self.name = name
        self.agent = agent
        self.bounds = bounds

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """The recorded score with its reason, or the scores that there are in its place."""
        if item.episode is None:
            return unscored(item, "there is no episode to read a score from")
        event = measured(item.episode, self.name, self.agent)
        if event is not None:
            return scored(item, (event.value, event.text or None))
        recorded = {
            _described(event.name, event.agent): None
            for event in item.episode.events
            if event.kind == "score"
        }
        missing, others = _described(self.name, self.agent), ", ".join(recorded) or "none"
        return unscored(item, f"the episode recorded no score {missing} (it recorded: {others})")


def _described(name: str, agent: str | None) -> str:
    return f"'{name}'" if agent is None else f"'{name}' of '{agent}'"


class MeasuredConfig(EvaluatorConfig, name="measured"):
    """The score that an episode measured of itself: `episode.score("reward", 0.7)`."""

    name: str = "reward"
    """The name of the score."""
    agent: AgentRef | None = None
    """Whose score it is, where each agent has its own."""
    bounds: ScoreBounds | None = None
    """The least and the most that it can be, such as `[-1, 1]`."""


@register_evaluator(config_type=MeasuredConfig)
async def measured_evaluator(config: MeasuredConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """The registered component `measured`."""
    yield MeasuredEvaluator(config.name, config.agent, config.bounds)
