"""Graders as evaluators of any config: `_type: grader`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json, to_jsonable_python

from etude.config.component import EvaluatorConfig
from etude.config.registry import register_evaluator
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.example import Example
from etude.core.interfaces import Evaluator
from etude.core.keys import fold
from etude.graders.grader import Grader, sample_of
from etude.graders.spec import GraderSpec, ScoreModelGrader, judges_of
from etude.graders.template import GraderError
from etude.rewards.evaluator import scored, unscored

if TYPE_CHECKING:
    from etude.config.builder import Builder


class GraderConfig(EvaluatorConfig, name="grader"):
    """One of OpenAI's graders, as its fine-tuning jobs and evaluations have them.

    `item` has the example's inputs, `id` and `expected`; `sample` the output as `output_text` (what is not
    text as JSON), as `output_json`, and the tool calls of the episode's last answer as `output_tools`.
    """

    grader: GraderSpec
    """The grader."""

    def asks_model(self) -> bool:
        return bool(judges_of(self.grader))


class GraderEvaluator(Evaluator):
    """Scores episodes with a grader; its reasoning are the scores of the single graders."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        if isinstance(grader.spec, ScoreModelGrader):
            self.bounds = grader.spec.range

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        output = item.output_obj
        text = output if isinstance(output, str) else to_json(output, fallback=str).decode()
        completions = () if item.episode is None else [call.completion for call in item.episode.calls]
        message = next((answer.message for answer in reversed(completions) if answer is not None), None)
        key = fold(0, "grader", item.id, item.generation)
        try:
            grade = await self._grader.grade(_columns(item), sample_of(text, message), key)
        except GraderError as error:
            return unscored(item, f"{error.problem}: {error}")
        return scored(item, (grade.score, dict(grade.scores)))


def _columns(item: EvalInputItem) -> dict[str, Any]:
    """The `item` of templates and programs, as JSON."""
    entry = item.full_dataset_entry
    inputs = entry.inputs if isinstance(entry, Example) else item.input_obj
    columns = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    made: dict[str, Any] = to_jsonable_python(
        {"id": item.id, "expected": item.expected_output_obj, **columns}, fallback=str
    )
    return made


@register_evaluator(config_type=GraderConfig)
async def grader(config: GraderConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """One of OpenAI's graders."""
    judges = {name: (await builder.get_llm(name)).complete for name in sorted(judges_of(config.grader))}
    yield GraderEvaluator(Grader(config.grader, judges))
