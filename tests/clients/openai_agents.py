"""The OpenAI Agents SDK: agents over the Responses API."""

from __future__ import annotations

import os
from typing import Any

from tests.clients.drive import QUESTION, Client, Sum, Target, add, same

CLIENT = Client("OpenAI Agents SDK", "openai-agents", {})


def _prepare(target: Target) -> None:
    """The SDK as its users set it up: a client of theirs, no tracing."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=target.base_url, api_key=target.api_key)
    agents.set_default_openai_client(client, use_for_tracing=False)
    agents.set_default_openai_api("responses")


def _tool() -> Any:
    from agents import function_tool

    return function_tool(add)


@CLIENT.feature("`Runner.run`, no model named: its default, with `reasoning`")
async def no_model(target: Target) -> None:
    from agents import Agent, Runner

    _prepare(target)
    if target.takes_any_name:
        os.environ.pop("OPENAI_DEFAULT_MODEL", None)
    else:
        # As the SDK has it said what its default is, where there is no model of OpenAI's.
        os.environ["OPENAI_DEFAULT_MODEL"] = target.model
    agent = Agent(name="adder", instructions="You add.")
    assert (await Runner.run(agent, QUESTION)).final_output


@CLIENT.feature("tools", calls=2, extends=True)
async def tools(target: Target) -> None:
    from agents import Agent, Runner

    _prepare(target)
    agent = Agent(name="adder", model=target.model, tools=[_tool()])
    result = await Runner.run(agent, QUESTION)
    same(
        [item.type for item in result.new_items],
        ["tool_call_item", "tool_call_output_item", "message_output_item"],
    )


@CLIENT.feature("tools, streamed", calls=2, extends=True)
async def streamed(target: Target) -> None:
    from agents import Agent, Runner

    _prepare(target)
    agent = Agent(name="adder", model=target.model, tools=[_tool()])
    result = Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in result.stream_events()]
    assert result.final_output and "raw_response_event" in kinds, kinds


@CLIENT.feature("two turns (`to_input_list`)", calls=2, extends=True)
def turns(target: Target) -> None:
    from agents import Agent, Runner

    _prepare(target)
    agent = Agent(name="adder", model=target.model)
    first = Runner.run_sync(agent, QUESTION)
    more = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
    assert Runner.run_sync(agent, more).final_output


@CLIENT.feature("`output_type`")
async def output_type(target: Target) -> None:
    from agents import Agent, Runner

    _prepare(target)
    agent = Agent(name="adder", model=target.model, output_type=Sum)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Sum)


@CLIENT.feature('`tool_choice="required"`, `parallel_tool_calls=False`', calls=2, extends=True)
async def required(target: Target) -> None:
    from agents import Agent, ModelSettings, Runner

    _prepare(target)
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="adder", model=target.model, tools=[_tool()], model_settings=settings)
    assert (await Runner.run(agent, QUESTION)).final_output


@CLIENT.feature("a handoff", calls=2)
async def handoff(target: Target) -> None:
    from agents import Agent, Runner

    _prepare(target)
    adder = Agent(name="adder", model=target.model)
    first = Agent(name="first", model=target.model, handoffs=[adder])
    result = await Runner.run(first, QUESTION)
    same(result.last_agent.name, "adder")


@CLIENT.feature("`OpenAIChatCompletionsModel`", calls=2, extends=True)
async def chat_completions(target: Target) -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    _prepare(target)
    client = AsyncOpenAI(base_url=target.base_url, api_key=target.api_key)
    model = OpenAIChatCompletionsModel(model=target.model, openai_client=client)
    assert (await Runner.run(Agent(name="adder", model=model, tools=[_tool()]), QUESTION)).final_output


@CLIENT.feature("`ModelSettings(reasoning=…, verbosity=…)`, what it sends for its default model")
async def reasoning(target: Target) -> None:
    from agents import Agent, ModelSettings, Runner
    from openai.types.shared import Reasoning

    _prepare(target)
    settings = ModelSettings(reasoning=Reasoning(effort="low"), verbosity="low")
    agent = Agent(name="adder", model=target.model, model_settings=settings)
    assert (await Runner.run(agent, QUESTION)).final_output
