"""A ready agent, which answers a prompt and calls tools until it needs no more, and a user to talk with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from etude.config.component import CHANGEABLE, WorkflowConfig
from etude.config.references import LlmRef, Refers
from etude.config.registry import made_by, register_workflow
from etude.core.episode import SIMULATED_USER, Example, ToolSet
from etude.core.errors import RequestError
from etude.core.message import Message, text_of
from etude.rollout.episode import Episode
from etude.rollout.workflow import Workflow

_INPUT = re.compile(r"\{(\w+)\}")


class AgentConfig(WorkflowConfig, name="agent"):
    """An agent with tools, which needs no code."""

    system: str = ""
    """The system message, in which `{name}` stands for an input of the example."""
    model: LlmRef | None = None
    """The entry of `llms` that the agent samples from; by default the one that is trained."""
    tools: Annotated[list[str] | None, Refers("tools")] = Field(default=None, min_length=1)
    """The tool sets that it has; by default all of the config's."""
    max_turns: Annotated[int, CHANGEABLE] = Field(default=10, ge=1)
    """Answers of the model to the prompt, those that call tools included."""
    timeout: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Seconds that an episode may take."""
    prompt: str = ""
    """The user's message, in which `{name}` stands for an input of the example. By default the input
    `messages` or `question`, or the only one."""

    def workflow(self, *sets: ToolSet) -> Workflow:
        """The agent, with tool sets of its own besides those of the config."""
        return Workflow(self.type_name, _answer, self.timeout, {"config": self, "sets": sets}, sets)


async def _answer(example: Example, episode: Episode, config: AgentConfig, sets: tuple[ToolSet, ...]) -> str:
    """The agent's answer to its prompt."""
    system = _filled(config.system, example, "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages += _prompt(example, config.prompt)
    async with episode.tools(*(config.tools or ()), *sets) as tools:
        for turn in range(1, config.max_turns + 1):
            reply = await episode.chat(messages, model=config.model, tools=tools.schemas)
            messages.append(reply.message)
            if not reply.tool_calls:
                return reply.text
            if turn < config.max_turns:
                messages += await tools.call_all(reply.tool_calls)
    episode.note(f"stopped after {config.max_turns} turns, with a call of a tool")
    return reply.text


def _filled(text: str, example: Example, key: str) -> str:
    """The text with the example's inputs in place. Raises RequestError for an input that there is not."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in example.inputs:
            raise RequestError(
                f"workflow.{key}: '{match[0]}' is no input of example '{example.id}'; inputs: "
                + ", ".join(example.inputs)
            )
        return str(example.inputs[match[1]])

    return _INPUT.sub(value, text)


def _prompt(example: Example, template: str) -> list[Message]:
    inputs = example.inputs
    if template:
        return [{"role": "user", "content": _filled(template, example, "prompt")}]
    if isinstance(inputs.get("messages"), list):
        return list(inputs["messages"])
    if "question" in inputs or len(inputs) == 1:
        return [{"role": "user", "content": str(inputs.get("question", next(iter(inputs.values()))))}]
    raise RequestError(
        f"example '{example.id}' has the inputs {', '.join(inputs) or '(none)'}; say which are asked for: "
        "`workflow: {prompt: '…{name}…'}`"
    )


register_workflow(config_type=AgentConfig)(made_by(AgentConfig.workflow))


_USER = """\
You are a person who talks with an assistant. Stay in that role: you are not the assistant.
{persona}Your goal: {goal}
Write one short message at a time, in your own words, and say no more than is needed.
When you have reached your goal, or see that you cannot, write only {stop}"""


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
        instructions: str = _USER,
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
        sides = {"user": "assistant", "assistant": "user"}
        seen: list[Message] = [
            {"role": sides[message["role"]], "content": text}
            for message in messages
            if message["role"] in sides and (text := text_of(message))
        ]
        if not seen or seen[0]["role"] == "assistant":
            seen.insert(0, {"role": "user", "content": self._greeting})
        return [{"role": "system", "content": self._instructions}, *seen]
