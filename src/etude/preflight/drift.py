"""The audit of a chat template: over which shapes of conversation it extends what was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from etude.core.call import Call, ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.message import Message, Tool
from etude.models.template import ChatTemplate
from etude.preflight.finding import Findings

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
_SYSTEM: Message = {"role": "system", "content": "You are brief."}
_AT_LENGTH: Message = {"role": "system", "content": "Now explain at length."}
_ASK: Message = {"role": "user", "content": "What is 1 + 2?"}
_SAID: Message = {"role": "assistant", "content": "It is 3."}
_MORE: Message = {"role": "user", "content": "And twice that?"}
_THOUGHT: Message = {"role": "assistant", "content": "<think>\n1 + 2 = 3.\n</think>\n\nIt is 3."}


@dataclass(frozen=True, slots=True)
class Shape:
    """A conversation as an agent may have it. Every answer in it is a call of the model."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def _calls(*ids: str) -> Message:
    call = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    calls = [{"id": id, "type": "function", "function": call} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(of: str) -> Message:
    return {"role": "tool", "tool_call_id": of, "name": "add", "content": "3"}


_IDS = ("call00000", "call00001")
_TOOL_TURN = (_ASK, _calls(_IDS[0]), _result(_IDS[0]))
_THOUGHT_CALL: Message = {**_calls(_IDS[0]), "content": "<think>\nI add.\n</think>\n\n"}

SHAPES = (
    Shape("a single turn", (_SYSTEM, _ASK, _SAID)),
    Shape("several turns", (_SYSTEM, _ASK, _SAID, _MORE, _SAID, _ASK)),
    Shape("several turns without a system message", (_ASK, _SAID, _MORE, _SAID, _ASK)),
    Shape("a tool call and its result", (*_TOOL_TURN, _SAID, _MORE), (TOOL,)),
    Shape("tool calls over several turns", (*_TOOL_TURN, _SAID, *_TOOL_TURN, _SAID, _MORE), (TOOL,)),
    Shape("two tool calls at once", (_ASK, _calls(*_IDS), *map(_result, _IDS), _SAID, _MORE), (TOOL,)),
    Shape("another system message later on", (_SYSTEM, _ASK, _SAID, _AT_LENGTH, _MORE)),
    Shape("thinking before an answer", (_ASK, _THOUGHT, _MORE, _THOUGHT, _ASK)),
    Shape("thinking before a tool call", (_ASK, _THOUGHT_CALL, _TOOL_TURN[-1], _SAID, _MORE), (TOOL,)),
)
"""The conversations that workflows are made of."""


def audit(template: ChatTemplate) -> Findings:
    """For each shape whether every prompt extends the tokens before it, and if not, what is at fault."""
    findings = Findings()
    for shape in SHAPES:
        try:
            faults = dict.fromkeys(_faults(template, shape))
        except EngineError as error:
            findings.warn(shape.name, f"refused: {error}")
            continue
        if faults:
            findings.warn(shape.name, f"starts a new branch: {'; '.join(faults)}")
        else:
            findings.ok(shape.name, "extends" if len(_prompts(shape)) > 1 else "renders")
    return findings


def _faults(template: ChatTemplate, shape: Shape) -> Iterator[str]:
    """Plays the conversation call by call; the fault of every prompt that drifts. Raises EngineError."""
    earlier: list[Call] = []
    for length in _prompts(shape):
        request = ChatRequest(shape.messages[:length], shape.tools, earlier=tuple(earlier))
        prompt = template.prompt(request)
        if prompt.fault is not None:
            yield str(prompt.fault)
        if length < len(shape.messages):
            # What was sampled does not matter: that it is gone on from does.
            sampled = Completion(
                shape.messages[length], prompt_ids=prompt.ids, completion_ids=template.completion_ids("!")
            )
            earlier.append(Call(len(earlier), "<workflow>", "audited", request, sampled))


def _prompts(shape: Shape) -> list[int]:
    """How many messages there are before each answer, one that is still to come included."""
    roles = [message["role"] for message in shape.messages]
    answers = [index for index, role in enumerate(roles) if role == "assistant"]
    return answers if roles[-1] == "assistant" else [*answers, len(roles)]
