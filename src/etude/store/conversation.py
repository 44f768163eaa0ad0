"""Episodes of plain workflows as a person reads them: what was asked, what was said, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from etude.core.call import Call, continues
from etude.core.episode import WORKFLOW, EpisodeRecord, Event
from etude.core.message import Message, is_text, text_of
from etude.rewards.evaluator import jsonable


def conversation(record: EpisodeRecord, *, raw: bool = False) -> dict[str, Any]:
    """An episode as JSON for a person: its calls and events in order, then its output or its failure.

    Of a call that continues an earlier one only the new messages are shown. `raw` shows every prompt whole,
    and all messages as they were sent and received.
    """
    example = record.example
    shown: dict[str, Any] = {
        "episode": record.id,
        "example": example.id,
        "inputs": jsonable(dict(example.inputs)),
        "expected": jsonable(example.expected),
        "turns": _turns(record, raw),
    }
    if record.failure is not None:
        return shown | {"failure": f"{record.failure.kind}: {record.failure.reason}"}
    return shown | {"output": jsonable(record.output)}


def _turns(record: EpisodeRecord, raw: bool) -> list[dict[str, Any]]:
    """The calls, each followed by what happened before the next."""
    turns = [_event(event) for event in record.events if event.after_call < 0]
    for place, call in enumerate(record.calls):
        turns.append(_raw_call(call) if raw else _call(call, record.calls[:place]))
        turns += [_event(event) for event in record.events if event.after_call == call.index]
    return turns


def _event(event: Event) -> dict[str, Any]:
    if event.kind == "note":
        return {"note": event.text}
    return {"step_reward": event.value, **({"reason": event.text} if event.text else {})}


def _call(call: Call, before: Sequence[Call]) -> dict[str, Any]:
    """A call with the messages that its prompt adds to the call that it continues."""
    messages = call.request.messages
    shown = _heading(call)
    earlier = next((one for one in reversed(before) if continues(messages, one)), None)
    if earlier is not None:
        messages = messages[len(earlier.request.messages) + 1 :]
        if earlier is not before[-1]:
            shown["continues"] = earlier.index
    shown["prompt"] = [_message(message) for message in messages]
    if call.completion is not None:
        shown |= _message(call.completion.message)
    return shown | _ending(call)


def _raw_call(call: Call) -> dict[str, Any]:
    """A call with its messages in OpenAI's format."""
    shown = _heading(call) | {"prompt": [jsonable(dict(message)) for message in call.request.messages]}
    if call.completion is not None:
        shown["answer"] = jsonable(dict(call.completion.message))
    return shown | _ending(call)


def _heading(call: Call) -> dict[str, Any]:
    function = {} if call.function == WORKFLOW else {"function": call.function}
    return {"call": call.index, **function, "model": call.model}


def _ending(call: Call) -> dict[str, Any]:
    """What is unusual about the end of a call."""
    shown: dict[str, Any] = {} if call.error is None else {"error": call.error}
    if call.completion is not None and call.completion.finish_reason == "length":
        shown["truncated"] = True
    return shown


def _message(message: Message) -> dict[str, Any]:
    """The text of a message under its role, and the tool calls in it by name."""
    called = [_tool_call(wire) for wire in message.get("tool_calls") or ()]
    content = text_of(message) if is_text(message) else jsonable(message["content"])
    shown = {str(message.get("role")): content} if content or not called else {}
    return shown | ({"tool_calls": called} if called else {})


def _tool_call(wire: Any) -> dict[str, Any]:
    """The name of a tool and its arguments; as text, where they are no JSON."""
    function = wire.get("function", {})
    arguments = function.get("arguments")
    try:
        return {str(function.get("name")): json.loads(arguments)}
    except (TypeError, ValueError):
        return {str(function.get("name")): jsonable(arguments)}
