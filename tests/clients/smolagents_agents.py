"""smolagents: both of its agents over chat completions."""

from __future__ import annotations

from typing import Any

from tests.clients.drive import QUESTION, Client, Target, add

CLIENT = Client("smolagents", "smolagents", {})


def _result(target: Target, agent: str, task: str, **options: Any) -> Any:
    import smolagents

    model = smolagents.OpenAIModel(target.model, api_base=target.base_url, api_key=target.api_key)
    tools = [smolagents.tool(add)] if agent == "ToolCallingAgent" else []
    made = getattr(smolagents, agent)(tools=tools, model=model, verbosity_level=0, max_steps=3, **options)
    result = made.run(task, return_full_result=True)
    assert result.state == "success", result
    return result.output


@CLIENT.feature("`ToolCallingAgent`, also with `stream_outputs=True`", calls=4)
def tool_calling(target: Target) -> None:
    for options in ({}, {"stream_outputs": True}):
        _result(target, "ToolCallingAgent", QUESTION, **options)


@CLIENT.feature("`CodeAgent`, also with `use_structured_outputs_internally=True`", calls=2)
def code(target: Target) -> None:
    assert _result(target, "CodeAgent", "Add 1 and 2.") == 3
    options = {"use_structured_outputs_internally": True}
    assert _result(target, "CodeAgent", "Add 1 and 2 in JSON.", **options) == 3
