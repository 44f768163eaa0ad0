"""pydantic-ai: agents over all three APIs, and all modes of output."""

from __future__ import annotations

from typing import Any

from tests.clients.drive import QUESTION, Client, Sum, Target, add, same

CLIENT = Client("pydantic-ai", "pydantic-ai-slim", {})


def _chat(target: Target) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=target.base_url, api_key=target.api_key)
    return OpenAIChatModel(target.model, provider=provider)


def _responses(target: Target) -> Any:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=target.base_url, api_key=target.api_key)
    return OpenAIResponsesModel(target.model, provider=provider)


def _anthropic(target: Target) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=target.anthropic_url, api_key=target.api_key)
    return AnthropicModel(target.model, provider=provider)


def _agent(model: Any, **options: Any) -> Any:
    from pydantic_ai import Agent

    return Agent(model, **options)


@CLIENT.feature("text, two turns (`message_history`)", calls=2, extends=True)
async def text(target: Target) -> None:
    agent = _agent(_chat(target), instructions="You add.")
    first = await agent.run(QUESTION)
    assert (await agent.run("Are you sure?", message_history=first.all_messages())).output


@CLIENT.feature("text as a stream (`run_stream`)")
async def stream(target: Target) -> None:
    async with _agent(_chat(target)).run_stream(QUESTION) as result:
        assert [piece async for piece in result.stream_text(delta=True)]


@CLIENT.feature("tools", calls=2, extends=True)
def tools(target: Target) -> None:
    assert _agent(_chat(target), tools=[add]).run_sync(QUESTION).output


@CLIENT.feature("tools over Responses (`OpenAIResponsesModel`)", calls=2, extends=True)
async def tools_responses(target: Target) -> None:
    assert (await _agent(_responses(target), tools=[add]).run(QUESTION)).output


@CLIENT.feature("tools over Messages (`AnthropicModel`)", calls=2, extends=True)
async def tools_messages(target: Target) -> None:
    assert (await _agent(_anthropic(target), tools=[add]).run(QUESTION)).output


async def _typed(model: Any, output: Any, question: str = QUESTION) -> None:
    result = await _agent(model, output_type=output).run(question)
    same(type(result.output), Sum)


@CLIENT.feature("`output_type` as it comes (a tool)")
async def output_tool(target: Target) -> None:
    await _typed(_chat(target), Sum)


@CLIENT.feature("`NativeOutput`")
async def output_native(target: Target) -> None:
    from pydantic_ai import NativeOutput

    await _typed(_chat(target), NativeOutput(Sum))


@CLIENT.feature("`PromptedOutput`")
async def output_prompted(target: Target) -> None:
    from pydantic_ai import PromptedOutput

    await _typed(_chat(target), PromptedOutput(Sum), "Answer in JSON.")


@CLIENT.feature("`output_type` and `NativeOutput` over Responses", calls=2)
async def output_responses(target: Target) -> None:
    from pydantic_ai import NativeOutput

    await _typed(_responses(target), Sum)
    await _typed(_responses(target), NativeOutput(Sum))


@CLIENT.feature("`output_type` over Messages")
async def output_messages(target: Target) -> None:
    await _typed(_anthropic(target), Sum)


@CLIENT.feature("`output_type` with a tool, and a stream of it", calls=2, extends=True)
async def output_stream(target: Target) -> None:
    agent = _agent(_chat(target), output_type=Sum, tools=[add])
    async with agent.run_stream(QUESTION) as result:
        same(type(await result.get_output()), Sum)
