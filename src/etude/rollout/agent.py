"""A ready agent that answers a prompt and calls tools, and a simulated user for agents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from etude.config.component import CHANGEABLE, WorkflowConfig
from etude.config.references import LlmRef, ReferenceTo
from etude.config.registry import config_factory, register_workflow
from etude.core.episode import SIMULATED_USER, Example, ToolSet
from etude.core.errors import RequestError
from etude.core.message import Message, message_text
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

_INPUT = re.compile(r"\{(\w+)\}")


class AgentConfig(WorkflowConfig, name="agent"):
    """An agent with tools, without code."""

    system: str = ""
    """Set the system message. `{name}` stands for an input of the example."""
    model: LlmRef | None = None
    """Name the entry of `llms` that the agent samples from; default: the trained one."""
    tools: Annotated[list[str] | None, ReferenceTo("tools")] = Field(default=None, min_length=1)
    """Name the agent's tool sets; default: all of the config's."""
    max_turns: Annotated[int, CHANGEABLE] = Field(default=10, ge=1)
    """Limit the model's answers to the prompt, including those that call tools."""
    prompt: str = ""
    """Set the user's message. `{name}` stands for an input of the example. Default: the input `messages` or
    `question`, or the only input."""

    def workflow(self, *sets: ToolSet) -> Workflow:
        """Return the agent as a workflow, with additional tool sets."""
        return Workflow(self.type_name, _answer, None, {"config": self, "sets": sets}, sets)

    def messages(self, example: Example) -> list[Message]:
        """Return the messages that an episode begins with. Raises RequestError for an unknown input."""
        system = _fill_inputs(self.system, example, "system")
        return [*([{"role": "system", "content": system}] if system else []), *_prompt(example, self.prompt)]


async def _answer(example: Example, episode: Episode, config: AgentConfig, sets: tuple[ToolSet, ...]) -> str:
    """Answer the prompt, calling tools until the model needs no more."""
    messages = config.messages(example)
    async with episode.tools(*(config.tools or episode.tool_sets), *sets) as tools:
        for turn in range(1, config.max_turns + 1):
            reply = await episode.chat(messages, model=config.model, tools=tools.schemas)
            messages.append(reply.message)
            if not reply.tool_calls:
                return reply.text
            if turn < config.max_turns:
                messages += await tools.call_all(reply.tool_calls)
    episode.note(f"stopped after {config.max_turns} turns, while it was still calling tools")
    return reply.text


def _fill_inputs(text: str, example: Example, key: str) -> str:
    """Fill the example's inputs into the text. Raises RequestError for an unknown input."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in example.inputs:
            raise RequestError(
                f"workflow.{key}: example '{example.id}' has no input '{match[0]}'; inputs: "
                + ", ".join(example.inputs)
            )
        return str(example.inputs[match[1]])

    return _INPUT.sub(value, text)


def _prompt(example: Example, template: str) -> list[Message]:
    inputs = example.inputs
    if template:
        return [{"role": "user", "content": _fill_inputs(template, example, "prompt")}]
    if isinstance(inputs.get("messages"), list):
        return list(inputs["messages"])
    if "question" in inputs or len(inputs) == 1:
        return [{"role": "user", "content": str(inputs.get("question", next(iter(inputs.values()))))}]
    raise RequestError(
        f"example '{example.id}' has the inputs {', '.join(inputs) or '(none)'}; name those to ask for: "
        "`workflow: {prompt: '…{name}…'}`"
    )


register_workflow(config_type=AgentConfig)(config_factory(AgentConfig.workflow))


_USER = """\
You are a person who talks with an assistant. Stay in that role: you are not the assistant.
{persona}Your goal: {goal}
Write one short message at a time, in your own words, and say no more than is needed.
When you have reached your goal, or see that you cannot, write only {stop}"""
_GREETING = "Hello! How can I help you?"
"""What a user that speaks first sees as the assistant's first words."""


class SimulatedUser:
    """A user of an agent, played by a model. Its calls are recorded, and never trained on.

    `reply(messages)` returns the user's next message in the agent's conversation, or None when the user has
    stopped.
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
    ) -> None:
        """Set up the user. `model` is an entry of `llms`. It stops with `stop` or after `max_turns` messages.

        Raises RequestError for an unknown model, an empty goal, and a limit that allows no message.
        """
        episode.require_model(model)
        if not goal.strip():
            raise RequestError("a simulated user needs a goal")
        if max_turns < 1 or not stop:
            raise RequestError("a simulated user needs a stop word and at least one turn")
        self._episode, self._model = episode, model
        self._stop, self._max_turns = stop, max_turns
        about = f"{persona.strip()}\n" if persona else ""
        self._instructions = _USER.format(goal=goal, persona=about, stop=stop)
        self.turns = 0
        """The number of messages that the user has written."""
        self.ended: Literal["stop", "turns"] | None = None
        """Why the user stopped: `stop` for the word, `turns` for the limit; None while it talks."""

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Return the user's answer to the conversation, or None at its end. The user sees only texts.

        Raises like `Episode.chat`, and EngineError for a model that writes nothing.
        """
        if self.ended is None and self.turns >= self._max_turns:
            self.ended = "turns"
        if self.ended is not None:
            return None
        with self._episode.function(SIMULATED_USER):
            reply = await self._episode.chat(self._user_view(messages), model=self._model)
        self.turns += 1
        if self._stop in reply.text:
            self.ended = "stop"
            return None
        return reply.text

    def _user_view(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation from the user's side, where the user's messages are the assistant's."""
        sides = {"user": "assistant", "assistant": "user"}
        seen: list[Message] = [
            {"role": sides[message["role"]], "content": text}
            for message in messages
            if message["role"] in sides and (text := message_text(message))
        ]
        if not seen or seen[0]["role"] == "assistant":
            seen.insert(0, {"role": "user", "content": _GREETING})
        return [{"role": "system", "content": self._instructions}, *seen]
