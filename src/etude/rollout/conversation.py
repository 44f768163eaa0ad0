"""A conversation of an agent with a simulated user, as a workflow that needs no code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from etude.config.references import LlmRef
from etude.config.registry import register_workflow
from etude.core.episode import SIMULATED_USER
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.message import Message, text_of
from etude.rollout.agent import Agent, AgentKeys, filled
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder

INSTRUCTIONS = """\
You are a person who talks with an assistant. Stay in that role: you are not the assistant.
{persona}Your goal: {goal}
Write one short message at a time, in your own words, and say no more than is needed.
When you have reached your goal, or see that you cannot, write only {stop}"""
"""The system message of a user that has no other."""


class SimulatedUser:
    """A user of an agent, played by a model. Its calls are recorded, and never trained on.

    `reply(messages)` is the user's next message to a conversation as the agent has it, or None when the user
    has stopped.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        goal: str,
        persona: str = "",
        model: str = "user",
        stop: str = "[DONE]",
        max_turns: int = 10,
        greeting: str = "Hello! How can I help you?",
        instructions: str = INSTRUCTIONS,
    ) -> None:
        """`model` is an entry of `llms`. The user stops by writing `stop`, and after `max_turns` messages.

        `instructions` is its system message, with `{goal}`, `{persona}` and `{stop}` filled in; `greeting` is
        the assistant's first words, as the user sees them where it speaks first. Raises RequestError for a
        model that there is not, an empty goal, and a limit that allows no message.
        """
        episode.require_model(model)
        if not goal.strip():
            raise RequestError("a simulated user needs a goal")
        if max_turns < 1 or not stop:
            raise RequestError("a simulated user needs a word to stop with, and at least one turn")
        self._episode, self._model = episode, model
        self._stop, self._max_turns = stop, max_turns
        self._greeting = greeting
        texts = {"goal": goal, "persona": f"{persona.strip()}\n" if persona else "", "stop": stop}
        self._instructions = instructions
        for name, text in texts.items():
            self._instructions = self._instructions.replace(f"{{{name}}}", text)
        self.turns = 0
        """Messages that the user has written."""
        self.ended: Literal["stop", "turns"] | None = None
        """Why the user has stopped: by the word, or by the limit of turns. None while it talks."""

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """The user's answer to the conversation so far, of which it sees the texts alone; None at its end.

        Raises as `Episode.chat` does, and EngineError for a model that writes nothing.
        """
        if self.ended is None and self.turns >= self._max_turns:
            self.ended = "turns"
        if self.ended is not None:
            return None
        with self._episode.function(SIMULATED_USER):
            reply = await self._episode.chat(self._seen(messages), model=self._model)
        self.turns += 1
        if self._stop in reply.text:
            self.ended = "stop"
            return None
        return reply.text

    def _seen(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation from the user's side: its own words are those of the model that plays it."""
        seen: list[Message] = [{"role": "system", "content": self._instructions}]
        for message in messages:
            text = text_of(message)
            if message["role"] in ("user", "assistant") and text:
                if len(seen) == 1 and message["role"] == "user":
                    seen.append({"role": "user", "content": self._greeting})
                role = "assistant" if message["role"] == "user" else "user"
                seen.append({"role": role, "content": text})
        if len(seen) == 1:
            seen.append({"role": "user", "content": self._greeting})
        return seen


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
