"""Scoring episodes with the toolkit's evaluators."""

from __future__ import annotations

import inspect
from typing import Any

from nat.data_models.evaluator import EvalInput
from nat.data_models.evaluator import EvalInputItem as NatItem
from nat.plugins.eval.dataset_handler.dataset_handler import DatasetHandler
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator
from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter
from nat.plugins.eval.utils.intermediate_step_adapter import IntermediateStepAdapter

from etude.core.errors import EpisodeError, RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.integrations.nat.agent import NatAgent
from etude.integrations.nat.examples import item_of


class NatEvaluator(Evaluator):
    """One evaluator of the toolkit's, asked about one episode at a time."""

    def __init__(self, agent: NatAgent, name: str) -> None:
        """Raises RequestError when the config has no evaluator of that name, or it can score nothing."""
        known = agent.config.eval.evaluators
        if name not in known:
            raise RequestError(f"there is no evaluator '{name}'; there are: {', '.join(known) or 'none'}")
        self._agent = agent
        self._name = name
        self._evaluator: Any = agent.builder.get_evaluator(name)
        if self._function("evaluate_atif_fn") is None and self._function("evaluate_fn") is None:
            raise RequestError(f"the evaluator '{name}' has no function to evaluate with")

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. An evaluator that fails has no score, and not the toolkit's 0.0."""
        found = await self._evaluate(self._prepared(item))
        error = found.error
        if error is None and isinstance(found.reasoning, dict) and found.score == 0.0:
            # What the toolkit makes of an evaluator that raised.
            error = found.reasoning.get("error")
        return EvalOutputItem.model_construct(
            id=item.id,
            generation=item.generation,
            score=found.score,
            reasoning=found.reasoning,
            error=error,
        )

    def _prepared(self, item: EvalInputItem) -> NatItem:
        """The episode as the toolkit's evaluations hand it over."""
        assert item.episode is not None, "a score is made of an episode"
        kept = self._agent.steps.of(item.episode.id) if self._agent.steps else []
        steps = IntermediateStepAdapter().validate_intermediate_steps(kept)
        prepared = item_of(item.episode.example, item.output_obj, steps)
        general = self._agent.config.eval.general
        process = general.output.custom_pre_eval_process_function if general.output else None
        if process is None:
            return prepared
        handler = DatasetHandler(general.dataset, 1, 1, custom_pre_eval_process_function=process)
        return handler.pre_eval_process_eval_input(EvalInput(eval_input_items=[prepared])).eval_input_items[0]

    async def _evaluate(self, item: NatItem) -> Any:
        one = EvalInput(eval_input_items=[item])
        atif, plain = self._function("evaluate_atif_fn"), self._function("evaluate_fn")
        if atif is not None:
            outputs = await atif(EvalAtifAdapter().build_samples(one))
        elif isinstance(owner := getattr(plain, "__self__", None), BaseEvaluator):
            # Its `evaluate` would draw a progress bar for every episode, and hide what is raised.
            return await owner.evaluate_item(item)
        else:
            found = plain(one) if plain else None
            outputs = await found if inspect.isawaitable(found) else found
        items = getattr(outputs, "eval_output_items", [])
        if len(items) != 1:
            raise EpisodeError(f"the evaluator '{self._name}' gave {len(items)} scores for one episode")
        return items[0]

    def _function(self, name: str) -> Any:
        found = getattr(self._evaluator, name, None)
        return found if callable(found) else None
