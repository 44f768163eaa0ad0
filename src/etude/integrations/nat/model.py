"""The model that is trained, as the toolkit's agents see it: an LLM type of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from nat.builder.builder import Builder
from nat.builder.context import Context
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.llm import LLMProviderInfo
from nat.cli.register_workflow import register_llm_client, register_llm_provider
from nat.data_models.llm import LLMBaseConfig
from pydantic import Field

from etude.core.errors import RequestError
from etude.integrations.nat.transport import API_KEY, BASE_URL, BlockingEpisodeTransport, EpisodeTransport


class EtudeModelConfig(LLMBaseConfig, name="etude_model"):
    """Takes the place of the trained entry of `llms` while episodes run. It is not for config files."""

    model_name: str = Field(description="The entry of `llms`.")


def function_name() -> str:
    """The toolkit's name of the function that is running: `<workflow>` for the agent itself."""
    return str(Context.get().active_function.function_name)


@register_llm_provider(config_type=EtudeModelConfig)
async def etude_model(config: EtudeModelConfig, _builder: Builder) -> AsyncIterator[LLMProviderInfo]:
    """Known to the toolkit as a model."""
    yield LLMProviderInfo(config=config, description="The model that Etude trains.")


@register_llm_client(config_type=EtudeModelConfig, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
async def etude_langchain(config: EtudeModelConfig, _builder: Builder) -> AsyncIterator[Any]:
    """For LangChain and LangGraph. It says nothing of sampling: as the model's own config has it."""
    from langchain_openai import ChatOpenAI

    name = config.model_name
    # Neither has a timeout: how long an answer takes is the engine's matter, and episodes have their own.
    asynchronous = httpx.AsyncClient(transport=EpisodeTransport(name, function_name), timeout=None)
    blocking = httpx.Client(transport=BlockingEpisodeTransport(name, function_name), timeout=None)
    async with asynchronous:
        with blocking:
            yield ChatOpenAI(
                model=name,
                api_key=API_KEY,
                base_url=BASE_URL,
                max_retries=0,
                http_async_client=asynchronous,
                http_client=blocking,
            )


def _refusing(framework: LLMFrameworkEnum) -> Callable[..., AsyncIterator[Any]]:
    """A client for a framework that has none, to say so by a better name than a missing registration."""

    async def refuse(config: EtudeModelConfig, _builder: Builder) -> AsyncIterator[Any]:
        raise RequestError(
            f"llms.{config.model_name} is trained, and the agent wants it for '{framework.value}'; "
            "calls are recorded for agents that want it for 'langchain'"
        )
        yield  # What makes it a generator.

    return refuse


for _framework in LLMFrameworkEnum:
    if _framework is not LLMFrameworkEnum.LANGCHAIN:
        register_llm_client(config_type=EtudeModelConfig, wrapper_type=_framework)(_refusing(_framework))
