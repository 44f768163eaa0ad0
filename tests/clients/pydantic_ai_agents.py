"""pydantic-ai: agents over all three APIs, and all modes of output."""

from __future__ import annotations

from typing import Any

from tests.clients.drive import QUESTION, Client, Sum, Target, add, same

CLIENT = Client("pydantic-ai-slim")


def _agent(target: Target, api: str = "chat", **options: Any) -> Any:
    """An agent over `chat`, `responses` or `messages`."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if api == "messages":
        provider = AnthropicProvider(base_url=target.anthropic_url, api_key=target.api_key)
        return Agent(AnthropicModel(target.model, provider=provider), **options)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
    openai = OpenAIProvider(base_url=target.base_url, api_key=target.api_key)
    return Agent(kind(target.model, provider=openai), **options)


async def _run_typed(agent: Any, question: str = QUESTION) -> None:
    same(type((await agent.run(question)).output), Sum)


@CLIENT.feature(calls=2, extends=True)
async def text(target: Target) -> None:
    agent = _agent(target, instructions="You add.")
    first = await agent.run(QUESTION)
    assert (await agent.run("Are you sure?", message_history=first.all_messages())).output


@CLIENT.feature()
async def stream(target: Target) -> None:
    async with _agent(target).run_stream(QUESTION) as result:
        assert [piece async for piece in result.stream_text(delta=True)]


@CLIENT.feature(calls=2, extends=True)
def tools(target: Target) -> None:
    assert _agent(target, tools=[add]).run_sync(QUESTION).output


@CLIENT.feature(calls=2, extends=True)
async def tools_responses(target: Target) -> None:
    assert (await _agent(target, "responses", tools=[add]).run(QUESTION)).output


@CLIENT.feature(calls=2, extends=True)
async def tools_messages(target: Target) -> None:
    assert (await _agent(target, "messages", tools=[add]).run(QUESTION)).output


@CLIENT.feature(calls=3)
async def outputs(target: Target) -> None:
    from pydantic_ai import NativeOutput, PromptedOutput

    await _run_typed(_agent(target, output_type=Sum))
    await _run_typed(_agent(target, output_type=NativeOutput(Sum)))
    await _run_typed(_agent(target, output_type=PromptedOutput(Sum)), "Answer in JSON.")


@CLIENT.feature(calls=3)
async def outputs_elsewhere(target: Target) -> None:
    from pydantic_ai import NativeOutput

    await _run_typed(_agent(target, "responses", output_type=Sum))
    await _run_typed(_agent(target, "responses", output_type=NativeOutput(Sum)))
    await _run_typed(_agent(target, "messages", output_type=Sum))


@CLIENT.feature(calls=2, extends=True)
async def output_stream(target: Target) -> None:
    async with _agent(target, output_type=Sum, tools=[add]).run_stream(QUESTION) as result:
        same(type(await result.get_output()), Sum)
