"""smolagents: both of its agents over chat completions."""

from __future__ import annotations

from typing import Any

from tests.clients.drive import QUESTION, Client, Target, add

CLIENT = Client("smolagents", "smolagents", {})


def _model(target: Target) -> Any:
    from smolagents import OpenAIModel

    return OpenAIModel(model_id=target.model, api_base=target.base_url, api_key=target.api_key)


def _tool() -> Any:
    from smolagents import tool

    return tool(add)


@CLIENT.feature("`ToolCallingAgent`", calls=2)
def tool_calling(target: Target) -> None:
    from smolagents import ToolCallingAgent

    agent = ToolCallingAgent(tools=[_tool()], model=_model(target), verbosity_level=0, max_steps=3)
    result = agent.run(QUESTION, return_full_result=True)
    assert result.state == "success", result


@CLIENT.feature("`ToolCallingAgent(stream_outputs=True)`", calls=2)
def tool_calling_stream(target: Target) -> None:
    from smolagents import ToolCallingAgent

    agent = ToolCallingAgent(
        tools=[_tool()], model=_model(target), verbosity_level=0, max_steps=3, stream_outputs=True
    )
    result = agent.run(QUESTION, return_full_result=True)
    assert result.state == "success", result


@CLIENT.feature("`CodeAgent`")
def code(target: Target) -> None:
    from smolagents import CodeAgent

    agent = CodeAgent(tools=[], model=_model(target), verbosity_level=0, max_steps=3)
    result = agent.run("Add 1 and 2.", return_full_result=True)
    assert result.state == "success" and result.output == 3, result


@CLIENT.feature("`CodeAgent(use_structured_outputs_internally=True)`")
def code_structured(target: Target) -> None:
    from smolagents import CodeAgent

    agent = CodeAgent(
        tools=[],
        model=_model(target),
        verbosity_level=0,
        max_steps=3,
        use_structured_outputs_internally=True,
    )
    result = agent.run("Add 1 and 2 in JSON.", return_full_result=True)
    assert result.state == "success" and result.output == 3, result
