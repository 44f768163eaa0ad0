"""A workflow and an evaluator of the NeMo Agent Toolkit. Neither knows anything of Etude."""

from collections.abc import AsyncIterator

from langchain_core.messages import HumanMessage
from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator


class SortConfig(FunctionBaseConfig, name="sort_letters"):
    llm: LLMRef


@register_function(config_type=SortConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def sort_letters(config: SortConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def sort(letters: str) -> str:
        reply = await llm.ainvoke([HumanMessage(f"Sort: {letters}")])
        return str(reply.content).strip()

    yield FunctionInfo.from_fn(sort, description="Sorts letters.")


class InPlaceConfig(EvaluatorBaseConfig, name="in_place"):
    pass


class InPlace(BaseEvaluator):
    """The share of positions that hold the right letter."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        output, expected = str(item.output_obj), str(item.expected_output_obj)
        right = sum(a == b for a, b in zip(output, expected, strict=False))
        return EvalOutputItem(id=item.id, score=right / max(len(output), len(expected)), reasoning=output)


@register_evaluator(config_type=InPlaceConfig)
async def in_place(config: InPlaceConfig, builder: EvalBuilder) -> AsyncIterator[EvaluatorInfo]:
    evaluator = InPlace(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Letters in place.")
