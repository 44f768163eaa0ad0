"""The OpenAI Agents SDK: agents over the Responses API."""

from __future__ import annotations

import os
from typing import Any

from tests.clients.drive import QUESTION, Client, Sum, Target, add, same

CLIENT = Client("openai-agents")


def _agent(target: Target, *, with_tool: bool = False, **options: Any) -> Any:
    """An agent, with the SDK as its users set it up: a client of theirs, no tracing."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=target.base_url, api_key=target.api_key)
    agents.set_default_openai_client(client, use_for_tracing=False)
    agents.set_default_openai_api("responses")
    tools = [agents.function_tool(add)] if with_tool else []
    return agents.Agent(**{"name": "adder", "model": target.model, "tools": tools, **options})


async def _run(agent: Any) -> Any:
    from agents import Runner

    result = await Runner.run(agent, QUESTION)
    assert result.final_output
    return result


@CLIENT.feature()
async def no_model(target: Target) -> None:
    if target.takes_any_name:
        os.environ.pop("OPENAI_DEFAULT_MODEL", None)
    else:
        # As the SDK has it said what its default is, where there is no model of OpenAI's.
        os.environ["OPENAI_DEFAULT_MODEL"] = target.model
    await _run(_agent(target, model=None, instructions="You add."))


@CLIENT.feature(calls=2, extends=True)
async def tools(target: Target) -> None:
    result = await _run(_agent(target, with_tool=True))
    same(
        [item.type for item in result.new_items],
        ["tool_call_item", "tool_call_output_item", "message_output_item"],
    )


@CLIENT.feature(calls=2, extends=True)
async def stream(target: Target) -> None:
    from agents import Runner

    result = Runner.run_streamed(_agent(target, with_tool=True), QUESTION)
    kinds = [event.type async for event in result.stream_events()]
    assert result.final_output and "raw_response_event" in kinds, kinds


@CLIENT.feature(calls=2, extends=True)
def turns(target: Target) -> None:
    from agents import Runner

    agent = _agent(target)
    first = Runner.run_sync(agent, QUESTION)
    more = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
    assert Runner.run_sync(agent, more).final_output


@CLIENT.feature()
async def output_type(target: Target) -> None:
    same(type((await _run(_agent(target, output_type=Sum))).final_output), Sum)


@CLIENT.feature(calls=2, extends=True)
async def required_tool(target: Target) -> None:
    from agents import ModelSettings

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    await _run(_agent(target, with_tool=True, model_settings=settings))


@CLIENT.feature(calls=2)
async def handoff(target: Target) -> None:
    result = await _run(_agent(target, name="first", handoffs=[_agent(target)]))
    same(result.last_agent.name, "adder")


@CLIENT.feature(calls=2, extends=True)
async def chat_completions(target: Target) -> None:
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=target.base_url, api_key=target.api_key)
    model = OpenAIChatCompletionsModel(model=target.model, openai_client=client)
    await _run(_agent(target, with_tool=True, model=model))


@CLIENT.feature()
async def reasoning(target: Target) -> None:
    from agents import ModelSettings
    from openai.types.shared import Reasoning

    settings = ModelSettings(reasoning=Reasoning(effort="low"), verbosity="low")
    await _run(_agent(target, model_settings=settings))
