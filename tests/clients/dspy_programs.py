"""DSPy: programs over chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.clients.drive import QUESTION, Client, Target, add

CLIENT = Client("DSPy", "dspy", {})


@contextmanager
def _dspy(target: Target, adapter: str = "", **options: Any) -> Iterator[Any]:
    """The package, set up for the target."""
    import dspy

    at = {"api_base": target.base_url, "api_key": target.api_key, "cache": False}
    model = dspy.LM(f"openai/{target.model}", **at, **options)
    with dspy.context(lm=model, adapter=getattr(dspy, adapter)() if adapter else None):
        yield dspy


@CLIENT.feature('`Predict`, also over Responses (`model_type="responses"`)', calls=2)
def predict(target: Target) -> None:
    for options in ({}, {"model_type": "responses"}):
        with _dspy(target, **options) as dspy:
            assert dspy.Predict("question -> answer")(question=QUESTION).answer


@CLIENT.feature("`ChainOfThought`, async")
async def chain_of_thought(target: Target) -> None:
    with _dspy(target) as dspy:
        answer = await dspy.ChainOfThought("question -> answer").acall(question=QUESTION)
    assert answer.answer and answer.reasoning, answer


@CLIENT.feature("`Predict` with `JSONAdapter` and a typed field")
def json_adapter(target: Target) -> None:
    with _dspy(target, "JSONAdapter") as dspy:
        assert isinstance(dspy.Predict("question -> sum: int")(question=QUESTION).sum, int)


@CLIENT.feature("`ReAct`", calls=2)
def react(target: Target) -> None:
    with _dspy(target) as dspy:
        result = dspy.ReAct("question -> answer", tools=[add], max_iters=2)(question=QUESTION)
    assert result.answer and "tool_name_0" in result.trajectory, result


@CLIENT.feature("`ReAct` with `JSONAdapter`", calls=2)
def react_json(target: Target) -> None:
    with _dspy(target, "JSONAdapter") as dspy:
        result = dspy.ReAct("question -> answer", tools=[add], max_iters=1)(question=QUESTION)
    assert "thought_0" in result.trajectory, result
