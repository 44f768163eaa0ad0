"""A ready agent: it answers a prompt, and calls tools until it needs no more."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from etude.config.component import CHANGEABLE, WorkflowConfig
from etude.config.references import LlmRef, Refers
from etude.config.registry import register_workflow
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.message import Message
from etude.core.tools import ToolSet
from etude.rollout.episode import Episode
from etude.rollout.tools import Tools
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder

_INPUT = re.compile(r"\{(\w+)\}")


class AgentKeys(WorkflowConfig):
    """The keys of all ready agents."""

    system: str = ""
    """The system message, in which `{name}` stands for an input of the example."""
    model: LlmRef | None = None
    """The entry of `llms` that the agent samples from; by default the one that is trained."""
    tools: Annotated[list[str] | None, Refers("tools")] = Field(default=None, min_length=1)
    """The tool sets that it has; by default all of the config's."""
    max_turns: Annotated[int, CHANGEABLE] = Field(default=10, ge=1)
    """Answers of the model to one prompt, those that call tools included."""
    timeout: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Seconds that an episode may take."""


class AgentConfig(AgentKeys, name="agent"):
    """An agent with tools, which needs no code."""

    prompt: str = ""
    """The user's message, in which `{name}` stands for an input of the example. By default the input
    `messages` or `question`, or the only one."""


def filled(text: str, example: Example, key: str) -> str:
    """The text with the example's inputs in place. Raises RequestError for an input that there is not."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in example.inputs:
            raise RequestError(
                f"workflow.{key}: '{match[0]}' is no input of example '{example.id}'; inputs: "
                + ", ".join(example.inputs)
            )
        return str(example.inputs[match[1]])

    return _INPUT.sub(value, text)


@dataclass(frozen=True)
class Agent:
    """Answers with a model and tools."""

    keys: AgentKeys
    sets: tuple[ToolSet, ...] = ()
    """Tool sets of its own, besides those of the config."""

    def tools(self, episode: Episode) -> AbstractAsyncContextManager[Tools]:
        """Open its tools."""
        return episode.tools(*(self.keys.tools or ()), *self.sets)

    def opening(self, example: Example) -> list[Message]:
        """The system message, if there is one."""
        text = filled(self.keys.system, example, "system")
        return [{"role": "system", "content": text}] if text else []

    async def answer(self, episode: Episode, messages: list[Message], tools: Tools) -> str:
        """The agent's answer to a conversation, which it is appended to, with all that led to it."""
        for turn in range(1, self.keys.max_turns + 1):
            reply = await episode.chat(messages, model=self.keys.model, tools=tools.schemas)
            messages.append(reply.message)
            if not reply.tool_calls:
                return reply.text
            if turn < self.keys.max_turns:
                messages += await tools.call_all(reply.tool_calls)
        episode.note(f"stopped after {self.keys.max_turns} turns, with a call of a tool")
        return reply.text


async def answer_prompt(example: Example, episode: Episode, agent: Agent, prompt: str) -> str:
    """The workflow of an agent that is asked once."""
    messages = agent.opening(example) + _prompt(example, prompt)
    async with agent.tools(episode) as tools:
        return await agent.answer(episode, messages, tools)


def _prompt(example: Example, template: str) -> list[Message]:
    inputs: Mapping[str, Any] = example.inputs
    if template:
        return [{"role": "user", "content": filled(template, example, "prompt")}]
    if isinstance(inputs.get("messages"), list):
        return list(inputs["messages"])
    if "question" in inputs or len(inputs) == 1:
        return [{"role": "user", "content": str(inputs.get("question", next(iter(inputs.values()))))}]
    raise RequestError(
        f"example '{example.id}' has the inputs {', '.join(inputs) or '(none)'}; say which are asked for: "
        "`workflow: {prompt: '…{name}…'}`"
    )


@register_workflow(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """An agent with the tools of the config."""
    yield agent_workflow(config, Agent(config))


def agent_workflow(config: AgentConfig, agent: Agent) -> Workflow:
    """The workflow of an agent that is asked once."""
    arguments = {"agent": agent, "prompt": config.prompt}
    return Workflow(config.type_name, answer_prompt, config.timeout, arguments, agent.sets)
