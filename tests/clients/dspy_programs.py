"""DSPy: programs over chat completions."""

from __future__ import annotations

from typing import Any

from tests.clients.drive import QUESTION, Client, Target, add

CLIENT = Client("DSPy", "dspy", {})


def _context(target: Target, adapter: str = "", **options: Any) -> Any:
    import dspy

    model = dspy.LM(
        f"openai/{target.model}", api_base=target.base_url, api_key=target.api_key, cache=False, **options
    )
    return dspy.context(lm=model, adapter=getattr(dspy, adapter)() if adapter else None)


@CLIENT.feature("`Predict`")
def predict(target: Target) -> None:
    import dspy

    with _context(target):
        assert dspy.Predict("question -> answer")(question=QUESTION).answer


@CLIENT.feature("`ChainOfThought`, async")
async def chain_of_thought(target: Target) -> None:
    import dspy

    with _context(target):
        answer = await dspy.ChainOfThought("question -> answer").acall(question=QUESTION)
    assert answer.answer and answer.reasoning, answer


@CLIENT.feature("`Predict` with `JSONAdapter` and a typed field")
def json_adapter(target: Target) -> None:
    import dspy

    with _context(target, "JSONAdapter"):
        assert isinstance(dspy.Predict("question -> sum: int")(question=QUESTION).sum, int)


@CLIENT.feature("`ReAct`", calls=2)
def react(target: Target) -> None:
    import dspy

    with _context(target):
        result = dspy.ReAct("question -> answer", tools=[add], max_iters=2)(question=QUESTION)
    assert result.answer and "tool_name_0" in result.trajectory, result


@CLIENT.feature("`ReAct` with `JSONAdapter`", calls=2)
def react_json(target: Target) -> None:
    import dspy

    with _context(target, "JSONAdapter"):
        result = dspy.ReAct("question -> answer", tools=[add], max_iters=1)(question=QUESTION)
    assert "thought_0" in result.trajectory, result


@CLIENT.feature('over Responses (`model_type="responses"`)')
def responses(target: Target) -> None:
    import dspy

    with _context(target, model_type="responses"):
        assert dspy.Predict("question -> answer")(question=QUESTION).answer
