"""The audit of a chat template: over which shapes of conversation it extends what was sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from etude.core.call import Call, ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.message import Message, Tool
from etude.models.template import ChatTemplate
from etude.preflight.finding import Findings

_TOOL: Tool = {
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


_TOOL_TURN = (_ASK, _calls("call00000"), _result("call00000"))

SHAPES = (
    Shape("a single turn", (_SYSTEM, _ASK, _SAID)),
    Shape("several turns", (_SYSTEM, _ASK, _SAID, _MORE, _SAID, _ASK)),
    Shape("several turns without a system message", (_ASK, _SAID, _MORE, _SAID, _ASK)),
    Shape("a tool call and its result", (*_TOOL_TURN, _SAID, _MORE), (_TOOL,)),
    Shape("tool calls over several turns", (*_TOOL_TURN, _SAID, *_TOOL_TURN, _SAID, _MORE), (_TOOL,)),
    Shape(
        "two tool calls at once",
        (_ASK, _calls("call00000", "call00001"), _result("call00000"), _result("call00001"), _SAID, _MORE),
        (_TOOL,),
    ),
    Shape("another system message later on", (_SYSTEM, _ASK, _SAID, _AT_LENGTH, _MORE)),
    Shape("thinking before an answer", (_ASK, _THOUGHT, _MORE, _THOUGHT, _ASK)),
    Shape(
        "thinking before a tool call",
        (
            _ASK,
            {**_calls("call00000"), "content": "<think>\nI add.\n</think>\n\n"},
            _result("call00000"),
            _SAID,
            _MORE,
        ),
        (_TOOL,),
    ),
)
"""The conversations that workflows are made of."""


def audit(template: ChatTemplate, shapes: Sequence[Shape] = SHAPES) -> Findings:
    """For each shape whether every prompt extends the tokens before it, and if not, what is at fault."""
    findings = Findings()
    for shape in shapes:
        try:
            faults = dict.fromkeys(_faults(template, shape))
        except EngineError as error:
            findings.warn(shape.name, f"refused: {error}")
            continue
        if faults:
            findings.warn(shape.name, f"starts a new branch: {'; '.join(faults)}")
        else:
            findings.ok(shape.name, "extends" if len(_answers(shape)) > 1 or _goes_on(shape) else "renders")
    return findings


def _faults(template: ChatTemplate, shape: Shape) -> Iterator[str]:
    """Plays the conversation call by call; the fault of every prompt that drifts. Raises EngineError."""
    earlier: list[Call] = []
    for at in [*_answers(shape), *([len(shape.messages)] if _goes_on(shape) else [])]:
        request = ChatRequest(shape.messages[:at], shape.tools, earlier=tuple(earlier))
        prompt = template.prompt(request)
        if prompt.fault is not None:
            yield str(prompt.fault)
        if at < len(shape.messages):
            # What was sampled does not matter: that it is gone on from does.
            sampled = Completion(
                shape.messages[at], prompt_ids=prompt.ids, completion_ids=template.completion_ids("!")
            )
            earlier.append(Call(len(earlier), "<workflow>", "audited", request, sampled))


def _answers(shape: Shape) -> list[int]:
    return [at for at, message in enumerate(shape.messages) if message["role"] == "assistant"]


def _goes_on(shape: Shape) -> bool:
    """Whether an answer is still to come."""
    return bool(shape.messages[-1]["role"] != "assistant")
