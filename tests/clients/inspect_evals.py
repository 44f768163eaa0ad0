"""Inspect AI: evaluations, over the Responses API and chat completions."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.clients.drive import QUESTION, Client, Sum, Target, same

CLIENT = Client("Inspect AI", "inspect_ai", {}, registry="venv")


def _evaluated(target: Target, *solvers: Any, responses: bool | None = None, **settings: Any) -> Any:
    """The sample of an evaluation of one question, which must have gone well."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes

    chosen = {} if responses is None else {"responses_api": responses}
    name = f"openai/{target.model}"
    model = get_model(name, base_url=target.base_url, api_key=target.api_key, memoize=False, **chosen)
    task = Task(dataset=[Sample(input=QUESTION, target="3")], solver=list(solvers), scorer=includes())
    with tempfile.TemporaryDirectory() as logs:
        [log] = eval(task, model=model, log_dir=logs, display="none", max_retries=0, **settings)
        assert log.status == "success", log.error
        [sample] = log.samples
    return sample


def _adder() -> Any:
    from inspect_ai.tool import tool

    @tool
    def add() -> Any:
        async def execute(a: int, b: int) -> str:
            """Add two numbers.

            Args:
                a: The first number.
                b: The second number.
            """
            return str(a + b)

        return execute

    return add()


@CLIENT.feature("`generate()`, as it comes")
def generates(target: Target) -> None:
    from inspect_ai.solver import generate

    same(_evaluated(target, generate()).scores["includes"].value, "C")


@CLIENT.feature("`use_tools()`", calls=2, extends=True)
def tools(target: Target) -> None:
    from inspect_ai.solver import generate, use_tools

    sample = _evaluated(target, use_tools(_adder()), generate())
    same([message.role for message in sample.messages], ["user", "assistant", "tool", "assistant"])


@CLIENT.feature("the same over chat completions (`responses_api=False`)", calls=2, extends=True)
def chat(target: Target) -> None:
    from inspect_ai.solver import generate, use_tools

    sample = _evaluated(target, use_tools(_adder()), generate(), responses=False)
    same([message.role for message in sample.messages], ["user", "assistant", "tool", "assistant"])


@CLIENT.feature("a `ResponseSchema`")
def schema(target: Target) -> None:
    from inspect_ai.model import GenerateConfig, ResponseSchema
    from inspect_ai.solver import generate
    from inspect_ai.util import json_schema

    wanted = ResponseSchema(name="sum", json_schema=json_schema(Sum))
    sample = _evaluated(
        target, generate(**GenerateConfig(response_schema=wanted).model_dump(exclude_none=True))
    )
    assert isinstance(Sum.model_validate_json(sample.output.completion), Sum)
