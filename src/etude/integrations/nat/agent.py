"""The toolkit's agent, built once and run on single examples, and the stand-in for its trained model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
from nat.builder.builder import Builder
from nat.builder.context import Context
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.llm import LLMProviderInfo
from nat.cli.register_workflow import register_llm_client, register_llm_provider
from nat.data_models.config import Config
from nat.data_models.intermediate_step import IntermediateStep, IntermediateStepType
from nat.data_models.llm import LLMBaseConfig
from nat.data_models.user_info import BasicUserInfo, UserInfo
from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder
from nat.runtime.session import SessionManager
from pydantic import BaseModel, Field, PrivateAttr, SecretStr
from pydantic_core import to_jsonable_python

from etude.core.episode import Example
from etude.core.errors import EpisodeError, RequestError
from etude.integrations.nat.transport import EpisodeTransport, keep_steps
from etude.rollout.episode import Episode
from etude.store.journal import Journal
from etude.wire.gateway import API_KEY, BASE_URL


class EtudeModelConfig(LLMBaseConfig, name="etude_model"):
    """The model that replaces the trained entry of `llms` while episodes run. Not for config files."""

    model_name: str = Field(description="The entry of `llms`.")
    _episodes: dict[str | None, Episode] = PrivateAttr(default_factory=dict)

    @contextlib.contextmanager
    def record_in(self, episode: Episode) -> Iterator[str]:
        """Yield the id of a conversation of the toolkit, and record its calls in `episode`."""
        conversation = str(uuid4())
        self._episodes[conversation] = episode
        try:
            yield conversation
        finally:
            del self._episodes[conversation]

    def current_episode(self) -> tuple[Episode | None, str]:
        """Return the episode of the toolkit's current conversation, and the name of the running function.

        The name is `<workflow>` for the agent itself.
        """
        context = Context.get()
        return self._episodes.get(context.conversation_id), str(context.active_function.function_name)


@register_llm_provider(config_type=EtudeModelConfig)
async def etude_model(config: EtudeModelConfig, _builder: Builder) -> AsyncIterator[LLMProviderInfo]:
    """Provide the trained model to the toolkit."""
    yield LLMProviderInfo(config=config, description="The model that Etude trains.")


@register_llm_client(config_type=EtudeModelConfig, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
async def etude_langchain(config: EtudeModelConfig, _builder: Builder) -> AsyncIterator[Any]:
    """Provide the trained model to LangChain and LangGraph. Its entry of `llms` sets how it samples."""
    from langchain_openai import ChatOpenAI

    # The clients have no timeout, because the engine and the episode have their own limits.
    transport = EpisodeTransport(config.model_name, config.current_episode)
    with httpx.Client(transport=transport, timeout=None) as blocking:
        async with httpx.AsyncClient(transport=transport, timeout=None) as asynchronous:
            yield ChatOpenAI(
                model=config.model_name,
                api_key=SecretStr(API_KEY),
                base_url=BASE_URL,
                max_retries=0,
                stream_usage=True,  # The toolkit's clients set this too: its evaluators count tokens.
                http_async_client=asynchronous,
                http_client=blocking,
            )


_USER = "nat_eval_user"
"""The user name in the toolkit's own evaluations."""


@dataclass(frozen=True)
class NatAgent:
    """A built workflow of the toolkit, with its config, builder and session manager."""

    config: Config
    builder: WorkflowEvalBuilder
    model: EtudeModelConfig
    sessions: SessionManager
    result: Any
    """The parsed JSON path of the answer in an output."""
    journal: Journal | None
    """Gets the steps of episodes, which evaluators read. None stores no steps."""

    async def run(self, example: Example, episode: Episode) -> Any:
        """Run the workflow on an example, and return its output as in the toolkit's evaluations."""
        name = f"{_USER}-{uuid4()}" if self.config.eval.general.per_input_user_id else _USER
        user = str(UserInfo(basic_user=BasicUserInfo(username=name, password=SecretStr(_USER))).get_user_id())
        with self.model.record_in(episode) as conversation:
            async with (
                self.sessions.session(user_id=user, conversation_id=conversation) as session,
                session.run(example.inputs["question"]) as runner,
            ):
                if not session.workflow.has_single_output:
                    raise EpisodeError("the workflow only streams; evaluations need one with a single output")
                steps: list[dict[str, Any]] = []

                def add(step: IntermediateStep) -> None:
                    # Skip the steps for single tokens. The step that ends a stream has the whole text.
                    if step.event_type is not IntermediateStepType.LLM_NEW_TOKEN:
                        steps.append(step.model_dump(exclude_none=True))

                Context.get().intermediate_step_manager.subscribe(on_next=add)
                output = await runner.result()
                with contextlib.suppress(ValueError):  # As in the toolkit, keep it if it cannot be converted.
                    output = runner.convert(output, to_type=str)
        if self.journal is not None:
            await keep_steps(self.journal, episode.id, steps)
        if isinstance(output, BaseModel):
            return output.model_dump_json(indent=2)
        matches = self.result.find(output)
        if not matches:
            raise EpisodeError(f"the output has nothing at --result_json_path {self.result}: {output!r:.200}")
        return to_jsonable_python(matches[0].value, fallback=str)


@asynccontextmanager
async def open_agent(
    config: Config, model: str, result_json_path: str = "$", journal: Journal | None = None
) -> AsyncIterator[NatAgent]:
    """Build the workflow and the evaluators of a config, and record the calls to `model`.

    Raises RequestError for an unknown model or a wrong path. Passes on the toolkit's errors.
    """
    from jsonpath_ng import parse
    from jsonpath_ng.exceptions import JSONPathError

    try:
        result = parse(result_json_path)
    except JSONPathError as error:
        problem = f"--result_json_path {result_json_path} is not a JSON path: {error}"
        raise RequestError(problem) from error
    if model not in config.llms:
        raise RequestError(
            f"there is no model '{model}' in `llms` to train; there are: {', '.join(config.llms)}"
        )
    # Etude's model replaces the trained one, and training is off.
    changes: dict[str, Any] = {"trainers": {}, "trainer_adapters": {}, "trajectory_builders": {}}
    changes["llms"] = {**config.llms, model: EtudeModelConfig(model_name=model)}
    # Without `run_configuration`: the toolkit's command puts the whole config there, a cycle.
    off = {"enabled": False, "run_configuration": None}
    changes["finetuning"] = config.finetuning.model_copy(update=off)
    config = config.model_copy(update=changes)
    async with WorkflowEvalBuilder.from_config(config=config) as builder:
        # The collector limits the concurrency.
        sessions = await SessionManager.create(config=config, shared_builder=builder, max_concurrency=0)
        try:
            yield NatAgent(config, builder, config.llms[model], sessions, result, journal)
        finally:
            await sessions.shutdown()
