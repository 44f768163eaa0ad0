"""Calls and episodes to JSON and back, exactly.

A call of a conversation repeats most of the call before it. So a call is stored as the difference to
a parent, an earlier call of its episode: how many leading messages and prompt token ids they share,
and the rest. Token ids are packed as 32-bit integers and logprobs as 64-bit floats, in base64.
"""

from __future__ import annotations

import binascii
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from etude.core.call import Call, ChatRequest, Completion, Constraint, Sampling, TopLogprobs, Usage
from etude.core.episode import EpisodeRecord, Event, Example, Failure, ToolUse
from etude.core.secrets import masked
from etude.store.journal import Json
from etude.store.plain import plain

_INT32 = "i"
_FLOAT64 = "d"
_SAMPLING = TypeAdapter(Sampling)


def encode_call(call: Call, parent: tuple[str, Call] | None) -> Json:
    """JSON of a call; `parent` is the name under which a decoder finds the earlier call, and that call."""
    request = call.request
    name, before = parent or (None, None)
    shared = 0 if before is None else shared_messages(before, request.messages)
    has_tools = before is not None and before.request.tools == request.tools
    data = {
        "index": call.index,
        "model": call.model,
        "function": call.function,
        "key": request.key,
        "sampling": to_jsonable_python(changed) if (changed := request.sampling.changed()) else None,
        "tool_choice": None if request.tool_choice == "auto" else request.tool_choice,
        "parallel_tool_calls": None if request.parallel_tool_calls else False,
        "template_options": dict(request.template_options) or None,
        "prompt": request.prompt,
        "top_logprobs": request.top_logprobs or None,
        "prompt_logprobs": request.prompt_logprobs,
        "parent": None if name is None else [name, shared],
        "messages": request.messages[shared:],
        "tools": None if has_tools else request.tools,
        "error": None if call.error is None else masked(call.error),
        "retried": dict(call.retried) or None,
        "waited": round(call.waited, 3) or None,
        "timed": [round(call.began, 6), round(call.seconds, 6)] if call.began else None,
        "logged": call.logged or None,
        "completion": None if call.completion is None else _encode_completion(call.completion, before),
    }
    return _without_none(data)


def decode_call(data: Json, conversation: str, parent: Call | None) -> Call:
    """The call that `encode_call` made `data` of; `parent` is the call that `parent_name(data)` names."""
    messages: tuple[Any, ...] = tuple(data["messages"])
    tools: tuple[Any, ...] = tuple(data.get("tools", ()))
    if parent is not None:
        messages = conversation_so_far(parent)[: data["parent"][1]] + messages
        tools = parent.request.tools if "tools" not in data else tools
    sampling = _SAMPLING.validate_python(data.get("sampling", {}))
    completion, timed = data.get("completion"), data.get("timed", (0.0, 0.0))
    return Call(
        index=data["index"],
        function=data["function"],
        model=data["model"],
        request=ChatRequest(
            messages,
            tools,
            sampling,
            data["key"],
            conversation,
            tool_choice=data.get("tool_choice", "auto"),
            parallel_tool_calls=data.get("parallel_tool_calls", True),
            template_options=data.get("template_options", {}),
            prompt=tuple(prompt) if isinstance(prompt := data.get("prompt"), list) else prompt,
            top_logprobs=data.get("top_logprobs", 0),
            prompt_logprobs=data.get("prompt_logprobs"),
        ),
        completion=None if completion is None else _decode_completion(completion, parent),
        error=data.get("error"),
        retried=data.get("retried", {}),
        waited=data.get("waited", 0.0),
        began=timed[0],
        seconds=timed[1],
        logged=data.get("logged", False),
    )


def parent_name(data: Json) -> str | None:
    """The name of the call that an encoded call is stored as the difference to."""
    return str(data["parent"][0]) if "parent" in data else None


def conversation_so_far(call: Call) -> tuple[Any, ...]:
    """The messages of a call and its answer."""
    messages = call.request.messages
    return messages if call.completion is None else (*messages, call.completion.message)


def shared_messages(before: Call, messages: Sequence[Any]) -> int:
    """How many leading messages are those of an earlier call and its answer."""
    earlier = conversation_so_far(before)
    shared = 0
    while shared < min(len(earlier), len(messages)) and earlier[shared] == messages[shared]:
        shared += 1
    return shared


def _encode_completion(completion: Completion, parent: Call | None) -> Json:
    ids = completion.prompt_ids
    shared, usage = _shared_ids(_token_ids(parent), ids or ()), completion.usage
    cached = [usage.cached_tokens] if usage.cached_tokens else []
    data = {
        "message": completion.message,
        "finish_reason": completion.finish_reason,
        "usage": [usage.prompt_tokens, usage.completion_tokens, *cached],
        "model_version": completion.model_version,
        "prompt_ids": None if ids is None else [shared, _pack(_INT32, ids[shared:])],
        "completion_ids": _pack(_INT32, completion.completion_ids),
        "logprobs": _pack(_FLOAT64, completion.logprobs),
        "top_logprobs": completion.top_logprobs or None,
        "token_texts": completion.token_texts or None,
        "prompt_logprobs": _pack(_FLOAT64, completion.prompt_logprobs or None),
        "prompt_top": completion.prompt_top or None,
        "drifted": completion.drifted or None,
        "fault": completion.fault or None,
        "constraint": None if completion.constraint is None else asdict(completion.constraint),
        "address": completion.address or None,
    }
    return _without_none(data)


def _decode_completion(data: Json, parent: Call | None) -> Completion:
    shared, packed = data.get("prompt_ids", (0, None))
    ids = _unpack(_INT32, packed)
    return Completion(
        message=data["message"],
        finish_reason=data["finish_reason"],
        prompt_ids=None if ids is None else _token_ids(parent)[:shared] + ids,
        completion_ids=_unpack(_INT32, data.get("completion_ids")),
        logprobs=_unpack(_FLOAT64, data.get("logprobs")),
        top_logprobs=_decode_top(data.get("top_logprobs", ())),
        token_texts=tuple(data.get("token_texts", ())),
        prompt_logprobs=_unpack(_FLOAT64, data.get("prompt_logprobs")) or (),
        prompt_top=_decode_top(data.get("prompt_top", ())),
        usage=Usage(*data["usage"]),
        model_version=data["model_version"],
        drifted=data.get("drifted", False),
        fault=data.get("fault", ""),
        constraint=Constraint(**data["constraint"]) if "constraint" in data else None,
        address=data.get("address", ""),
    )


def _decode_top(tops: Sequence[Any]) -> tuple[TopLogprobs, ...]:
    return tuple(tuple((token, float(logprob)) for token, logprob in top) for top in tops)


def _token_ids(call: Call | None) -> tuple[int, ...]:
    """Tokens of a call's prompt and completion; none where they are not known."""
    if call is None or call.completion is None:
        return ()
    return (call.completion.prompt_ids or ()) + (call.completion.completion_ids or ())


def _shared_ids(before: tuple[int, ...], ids: tuple[int, ...]) -> int:
    if ids[: len(before)] == before:
        return len(before)
    return next(index for index, token in enumerate(before) if index == len(ids) or ids[index] != token)


def _without_none(data: dict[str, Any]) -> Json:
    return {key: value for key, value in data.items() if value is not None}


def _pack(code: str, numbers: Sequence[int] | Sequence[float] | None) -> str | None:
    if numbers is None:
        return None
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return binascii.b2a_base64(packed, newline=False).decode("ascii")


def _unpack(code: str, text: str | None) -> tuple[Any, ...] | None:
    if text is None:
        return None
    packed = array(code)
    packed.frombytes(binascii.a2b_base64(text))
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def encode_episode(record: EpisodeRecord, names: Mapping[int, str]) -> Json:
    """JSON of a finished episode without the calls that are journalled under a name of their own.

    `names` has those by index; the others (calls that failed) are stored in full here.
    """
    failure = record.failure
    return {
        "episode": record.id,
        "generation": record.generation,
        "example": _encode_example(record.example),
        "calls": [names.get(call.index) or encode_call(call, None) for call in record.calls],
        "events": [_encode_event(event) for event in record.events],
        "output": record.output,
        "failure": None if failure is None else [failure.kind, masked(failure.reason), failure.origin],
        "seconds": record.seconds,
    }


def _encode_event(event: Event) -> list[Any]:
    """The fields of an event; of the last three, those up to the last that has a value."""
    text = masked(event.text) if event.text else ""
    fields = [event.kind, event.after_call, event.value, text]
    if event.tool is not None:
        return [*fields, event.name, event.agent, asdict(event.tool)]
    return [*fields, event.name, event.agent] if event.name or event.agent is not None else fields


def decode_episode(data: Json, calls: Sequence[Call], example: Example | None) -> EpisodeRecord:
    """The record that `encode_episode` made `data` of. `example` takes the place of the stored one."""
    return EpisodeRecord(
        id=data["episode"],
        example=example or Example(**data["example"]),
        generation=data["generation"],
        calls=tuple(calls),
        events=tuple(map(_decode_event, data["events"])),
        output=data["output"],
        failure=None if data["failure"] is None else Failure(*data["failure"]),
        seconds=data["seconds"],
    )


def _decode_event(data: Json) -> Event:
    event = Event(*data[:6])
    return replace(event, tool=ToolUse(**data[6])) if len(data) > 6 else event


def _encode_example(example: Example) -> Json:
    try:
        return plain(example)
    except TypeError:
        # Images and the like: shown by name, and taken from the dataset again where they are needed.
        inputs = {name: repr(value) for name, value in example.inputs.items()}
        return {"id": example.id, "inputs": inputs, "expected": repr(example.expected)}
