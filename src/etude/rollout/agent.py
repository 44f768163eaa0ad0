"""A ready agent that answers a prompt and calls tools."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from etude.config.component import CHANGEABLE, WorkflowConfig
from etude.config.references import LlmRef, ReferenceTo
from etude.config.registry import config_factory, register_workflow
from etude.core.episode import Example, ToolSet
from etude.core.errors import RequestError
from etude.core.message import Message
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
