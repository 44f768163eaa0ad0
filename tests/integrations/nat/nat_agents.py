"""Workflows and evaluators for tests, by the toolkit's interfaces: only its processes import this."""

import asyncio
import types
from collections.abc import AsyncIterator
from typing import Any

from langchain_core.messages import HumanMessage
from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function, register_llm_client
from nat.data_models.component_ref import FunctionRef, LLMRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.llm.openai_llm import OpenAIModelConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

LANGCHAIN = LLMFrameworkEnum.LANGCHAIN
FOREIGN = LLMFrameworkEnum.LLAMA_INDEX


class GuessConfig(FunctionBaseConfig, name="test_guess"):
    llm: LLMRef


@register_function(config_type=GuessConfig, framework_wrappers=[LANGCHAIN])
async def guess(config: GuessConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm, wrapper_type=LANGCHAIN)

    async def guess(letters: str) -> str:
        # In a thread and without asyncio, as many tools are.
        return str((await asyncio.to_thread(llm.invoke, [HumanMessage(f"Sort: {letters}")])).content)

    yield FunctionInfo.from_fn(guess, description="Guesses.")


class TwiceConfig(FunctionBaseConfig, name="test_twice"):
    llm: LLMRef
    helper: FunctionRef


@register_function(config_type=TwiceConfig, framework_wrappers=[LANGCHAIN])
async def twice(config: TwiceConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    """Asks a function of its, and then the model itself."""
    llm = await builder.get_llm(config.llm, wrapper_type=LANGCHAIN)
    helper = await builder.get_function(config.helper)

    async def twice(letters: str) -> dict[str, str]:
        guessed = await helper.ainvoke(letters)
        reply = await llm.ainvoke([HumanMessage(f"Sort: {letters}")])
        return {"guessed": str(guessed), "answer": str(reply.content).strip()}

    yield FunctionInfo.from_fn(twice, description="Asks twice.")


class StreamingConfig(FunctionBaseConfig, name="test_streaming"):
    llm: LLMRef


@register_function(config_type=StreamingConfig, framework_wrappers=[LANGCHAIN])
async def streaming(config: StreamingConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm, wrapper_type=LANGCHAIN)

    async def answer(letters: str) -> str:
        return "".join(
            [str(chunk.content) async for chunk in llm.astream([HumanMessage(f"Sort: {letters}")])]
        )

    yield FunctionInfo.from_fn(answer, description="Streams.")


class ForeignConfig(FunctionBaseConfig, name="test_foreign"):
    llm: LLMRef


@register_function(config_type=ForeignConfig)
async def foreign(config: ForeignConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    await builder.get_llm(config.llm, wrapper_type=FOREIGN)

    async def answer(letters: str) -> str:
        return letters

    yield FunctionInfo.from_fn(answer, description="Written for another framework.")


@register_llm_client(config_type=OpenAIModelConfig, wrapper_type=FOREIGN)
async def foreign_client(config: OpenAIModelConfig, builder: Builder) -> AsyncIterator[object]:
    """In place of the toolkit's own for that framework, which need not be installed."""
    yield object()


class FailingConfig(FunctionBaseConfig, name="test_failing"):
    pass


@register_function(config_type=FailingConfig)
async def failing(config: FailingConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    async def fail(letters: str) -> str:
        raise RuntimeError("the agent is out of order")

    yield FunctionInfo.from_fn(fail, description="Fails.")


def register_scorer(name: str, scorer: type[BaseEvaluator]) -> None:
    """As an evaluator of the toolkit without settings."""
    config_type = types.new_class("Config", (EvaluatorBaseConfig,), {"name": name})

    async def build(config: Any, builder: EvalBuilder) -> AsyncIterator[EvaluatorInfo]:
        yield EvaluatorInfo(config=config, evaluate_fn=scorer().evaluate, description=name)

    register_evaluator(config_type=config_type)(build)


class Broken(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        raise RuntimeError("the judge is asleep")


class Same(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=0.5, reasoning="all alike")


class Zero(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=0.0, reasoning={"error": "a letter is out of place"})


class Steps(BaseEvaluator):
    """Scores what happened: how many calls of models there were, a little less for what is out of place."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        calls = [step for step in item.trajectory if step.event_type == "LLM_END"]
        functions = [step.function_ancestry.function_name for step in calls]
        right = sum(a == b for a, b in zip(str(item.output_obj), str(item.expected_output_obj), strict=False))
        return EvalOutputItem(id=item.id, score=len(calls) + right / 100, reasoning=functions)


for _type in (Broken, Same, Zero, Steps):
    register_scorer(f"test_{_type.__name__.lower()}", _type)
