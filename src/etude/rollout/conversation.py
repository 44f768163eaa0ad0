"""A conversation of an agent with a simulated user, as a workflow that needs no code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from etude.config.references import LlmRef
from etude.config.registry import register_workflow
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.message import Message
from etude.rollout.agent import Agent, AgentKeys, filled
from etude.rollout.episode import Episode
from etude.rollout.simulated_user import INSTRUCTIONS, SimulatedUser
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder


class SimulatedUserConfig(BaseModel, extra="forbid", frozen=True):
    """Who talks with the agent. In the texts, `{name}` stands for an input of the example."""

    goal: str = Field(min_length=1)
    """The reason why the user talks with the agent."""
    persona: str = ""
    """Who the user is, and how it talks."""
    model: LlmRef = "user"
    """The entry of `llms` that plays the user; not one that is trained."""
    stop: str = Field(default="[DONE]", min_length=1)
    """The user writes it to end the conversation."""
    max_turns: int = Field(default=10, ge=1)
    """Messages of the user; the conversation ends after the answer to the last."""
    instructions: str = INSTRUCTIONS
    """The user's system message, with `{goal}`, `{persona}` and `{stop}`."""


class ConversationConfig(AgentKeys, name="conversation"):
    """An agent with tools that talks with a simulated user until that one stops.

    The output has the agent's last `answer`, the `messages` as the agent has them, and how it `ended`: `stop`
    or `turns`.
    """

    user: SimulatedUserConfig
    """Who talks with the agent."""
    first: Literal["user", "agent"] = "user"
    """Who speaks first."""


async def converse(
    example: Example, episode: Episode, agent: Agent, config: ConversationConfig
) -> dict[str, Any]:
    """The workflow of a conversation."""
    keys = config.user
    user = SimulatedUser(
        episode,
        goal=filled(keys.goal, example, "user.goal"),
        persona=filled(keys.persona, example, "user.persona"),
        model=keys.model,
        stop=keys.stop,
        max_turns=keys.max_turns,
        instructions=keys.instructions,
    )
    messages: list[Message] = agent.opening(example)
    answer = ""
    async with agent.tools(episode) as tools:
        if config.first == "agent":
            answer = await agent.answer(episode, messages, tools)
        while (text := await user.reply(messages)) is not None:
            messages.append({"role": "user", "content": text})
            answer = await agent.answer(episode, messages, tools)
    return {"answer": answer, "messages": messages, "ended": user.ended}


@register_workflow(config_type=ConversationConfig)
async def conversation(config: ConversationConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises RequestError where the user's model is one that is trained."""
    block = builder.config.finetuning
    trained = {block.target_model, *(each.model for each in block.targets.values() if not each.frozen)}
    if block.enabled and config.user.model in trained:
        raise RequestError(
            f"workflow.user.model: '{config.user.model}' is trained, and a simulated user is not; add "
            "another entry to `llms` for it, of the same model if you like"
        )
    arguments = {"agent": Agent(config), "config": config}
    yield Workflow("conversation", converse, config.timeout, arguments)
