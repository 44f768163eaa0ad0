"""Conversations of every shape: how a chat template is read, and over which it extends what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.core.call import Call, ChatRequest, Completion
from etude.core.message import Message, Tool
from etude.models.family import written_answers
from etude.models.template import ChatTemplate
from tests.models.round_trips import unread_values, written_ids

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
_THOUGHT: Message = {**_SAID, "reasoning_content": "1 + 2 = 3."}


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
_THOUGHT_CALL: Message = {**_calls(_IDS[0]), "reasoning_content": "I add."}

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


def tools(template: ChatTemplate) -> str:
    """Whether its tool calls are understood."""
    if lacking := missing(template, "call"):
        return f"not understood: {', '.join(lacking)}"
    if unread := unread_values(template):
        return f"understood, but for {', '.join(unread)}"
    if any("call" in kind for kind in template.family().written):
        return "understood"
    return "the template shows no tools to the model"


def thinking(template: ChatTemplate) -> str:
    """Whether its thinking is separated, and whether it stays in the prompt."""
    if lacking := missing(template, "thinking"):
        return f"not separated: {', '.join(lacking)}"
    if template.rendering.thinking_key is None:
        return "the template knows none"
    kept = "dropped once the user speaks again" if template.drops_thinking else "kept"
    return f"separated, {kept}"


@dataclass(slots=True)
class Play:
    """A conversation, played call by call. The same fault is in a list once."""

    drift: dict[str, None] = field(default_factory=dict)
    on_purpose: dict[str, None] = field(default_factory=dict)


def played(template: ChatTemplate, shape: Shape) -> Play:
    """Plays the conversation. Raises EngineError where the template refuses it."""
    earlier: list[Call] = []
    play = Play()
    for length in _prompts(shape):
        request = ChatRequest(shape.messages[:length], shape.tools, earlier=tuple(earlier))
        prompt = template.prompt(request)
        if prompt.fault:
            (play.drift if prompt.drifted else play.on_purpose)[prompt.fault] = None
        if length < len(shape.messages):
            answer = shape.messages[length]
            ids = written_ids(template, request, answer)
            sampled = Completion(answer, prompt_ids=prompt.ids, completion_ids=ids)
            earlier.append(Call(len(earlier), "<workflow>", "audited", request, sampled))
    return play


def _prompts(shape: Shape) -> list[int]:
    """How many messages there are before each answer, one that is still to come included."""
    roles = [message["role"] for message in shape.messages]
    answers = [index for index, role in enumerate(roles) if role == "assistant"]
    return answers if roles[-1] == "assistant" else [*answers, len(roles)]


def missing(template: ChatTemplate, part: str) -> list[str]:
    """The kinds of answers with `part`, like `call` or `thinking`, that are written and not understood."""
    reader, answers = template.family().reader, written_answers(template.rendering, {})
    return [each.kind for each in answers if part in each.kind and not each.is_understood_by(reader)]
