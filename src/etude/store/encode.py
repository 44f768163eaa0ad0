"""The exact conversion of calls and episodes to JSON and back.

A call repeats most of the conversation before it. So it is stored as its difference to an earlier call, its
parent: the number of leading messages and prompt token ids that they share, and the rest. Token ids are
packed as 32-bit integers and logprobs as 64-bit floats, in base64. Fields with their default values are left
out.
"""

from __future__ import annotations

import binascii
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from etude.core.call import Call, ChatRequest, Completion, Constraint, Sampling, Usage
from etude.core.episode import EpisodeRecord, Event, Example, Failure, ToolUse
from etude.core.json_text import jsonable, plain
from etude.core.secrets import masked
from etude.store.journal import Json

_SAMPLING = TypeAdapter(Sampling)
_PACKED = {"completion_ids": "i", "logprobs": "d", "prompt_logprobs": "d"}
"""The fields of a completion that are packed, with the type of number in each."""
_APART = ("messages", "tools", "sampling", "conversation", "earlier", "on_delta")
"""The fields of a request that are encoded separately, or not at all."""


@cache
def _plain_fields(kind: Any, but: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any, tuple[Any, ...]]:
    """Return the names of a dataclass's fields except `but`, a getter of their values, and their defaults."""
    kept = [each for each in fields(kind) if each.name not in but]
    names = tuple(each.name for each in kept)
    made = (each.default_factory for each in kept)
    defaults = (each.default if make is MISSING else make() for each, make in zip(kept, made, strict=True))
    return names, attrgetter(*names), tuple(defaults)


def _changed(value: Any, *but: str) -> dict[str, Any]:
    """Return the fields of a dataclass that are not at their defaults, except `but`."""
    names, values_of, defaults = _plain_fields(value.__class__, but)
    known = zip(names, values_of(value), defaults, strict=True)
    return {name: own for name, own, default in known if own is not default and own != default}


def encode_call(call: Call, parent: tuple[str, Call] | None) -> Json:
    """Encode a call. `parent` is an earlier call, with the name under which a decoder finds it."""
    request, (name, before) = call.request, parent or (None, None)
    data = _changed(call, "request", "completion") | _changed(request, *_APART)
    data["messages"] = request.messages
    if before is not None:
        shared = shared_messages(before, request.messages)
        data |= {"parent": [name, shared], "messages": request.messages[shared:]}
    if before is None or before.request.tools != request.tools:
        data["tools"] = request.tools
    if sampling := request.sampling.changed():
        data["sampling"] = to_jsonable_python(sampling)
    if call.error is not None:
        data["error"] = masked(call.error)
    if call.completion is not None:
        data["completion"] = _encode_completion(call.completion, before)
    return data


def decode_call(data: Json, conversation: str, parent: Call | None) -> Call:
    """Decode what `encode_call` returned. `parent` is the call that `parent_name(data)` names."""
    given = {**data, "conversation": conversation, "messages": tuple(data["messages"])}
    if parent is not None:
        given["messages"] = conversation_so_far(parent)[: given.pop("parent")[1]] + given["messages"]
        given.setdefault("tools", parent.request.tools)
    given["tools"] = tuple(given["tools"])
    given["sampling"] = _SAMPLING.validate_python(given.get("sampling", {}))
    if isinstance(given.get("prompt"), list):
        given["prompt"] = tuple(given["prompt"])
    if "completion" in given:
        given["completion"] = _decode_completion(given["completion"], parent)
    asked = {name: given.pop(name) for name in _plain_fields(ChatRequest)[0] if name in given}
    return Call(request=ChatRequest(**asked), **given)


def parent_name(data: Json) -> str | None:
    """Return the name of the parent that an encoded call is a difference to, or None."""
    return str(data["parent"][0]) if "parent" in data else None


def conversation_so_far(call: Call) -> tuple[Any, ...]:
    """Return the messages of a call, with its answer."""
    messages = call.request.messages
    return messages if call.completion is None else (*messages, call.completion.message)


def shared_messages(before: Call, messages: Sequence[Any]) -> int:
    """Return how many leading messages repeat an earlier call and its answer."""
    earlier = conversation_so_far(before)
    shared = 0
    while shared < min(len(earlier), len(messages)) and earlier[shared] == messages[shared]:
        shared += 1
    return shared


def _encode_completion(completion: Completion, parent: Call | None) -> Json:
    data = _changed(completion, "prompt_ids", "usage", "constraint")
    data |= {name: _pack(code, data[name]) for name, code in _PACKED.items() if name in data}
    if (ids := completion.prompt_ids) is not None:
        before = _token_ids(parent)
        shared = len(before)
        if ids[:shared] != before:
            shared = next(at for at, token in enumerate(before) if at == len(ids) or ids[at] != token)
        data["prompt_ids"] = [shared, _pack("i", ids[shared:])]
    usage = completion.usage
    data["usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
    if completion.constraint is not None:
        data["constraint"] = asdict(completion.constraint)
    return data


def _decode_completion(data: Json, parent: Call | None) -> Completion:
    given = {**data, "usage": Usage(*data["usage"])}
    given |= {name: _unpack(code, given[name]) for name, code in _PACKED.items() if name in given}
    if "prompt_ids" in given:
        shared, packed = given["prompt_ids"]
        given["prompt_ids"] = _token_ids(parent)[:shared] + _unpack("i", packed)
    for name in given.keys() & {"top_logprobs", "prompt_top"}:
        given[name] = tuple(tuple((token, float(value)) for token, value in top) for top in given[name])
    given["token_texts"] = tuple(given.get("token_texts", ()))
    if "constraint" in given:
        given["constraint"] = Constraint(**given["constraint"])
    return Completion(**given)


def _token_ids(call: Call | None) -> tuple[int, ...]:
    """Return the token ids of a call's prompt and completion, or none if they are unknown."""
    if call is None or call.completion is None:
        return ()
    return (call.completion.prompt_ids or ()) + (call.completion.completion_ids or ())


def _pack(code: str, numbers: Sequence[int] | Sequence[float]) -> str:
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return binascii.b2a_base64(packed, newline=False).decode("ascii")


def _unpack(code: str, text: str) -> tuple[Any, ...]:
    packed = array(code)
    packed.frombytes(binascii.a2b_base64(text))
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def encode_episode(record: EpisodeRecord, names: Mapping[int, str]) -> Json:
    """Encode a finished episode. Calls that are journalled separately appear by their names.

    `names` has those by index. The other calls have failed, and are stored in full here.
    """
    failure = record.failure
    return {
        "episode": record.id,
        "generation": record.generation,
        "example": _encode_example(record.example),
        "calls": [names.get(call.index) or encode_call(call, None) for call in record.calls],
        "events": [
            _changed(replace(event, text=masked(event.text)))
            | ({} if event.tool is None else {"tool": asdict(event.tool)})
            for event in record.events
        ],
        "output": record.output,
        "failure": None if failure is None else [failure.kind, masked(failure.reason), failure.origin],
        "seconds": record.seconds,
    }


def decode_episode(data: Json, calls: Sequence[Call], example: Example | None) -> EpisodeRecord:
    """Decode what `encode_episode` returned. `example` replaces the stored example."""
    return EpisodeRecord(
        id=data["episode"],
        example=example or Example(**data["example"]),
        generation=data["generation"],
        calls=tuple(calls),
        events=tuple(
            Event(**each | {"tool": ToolUse(**each["tool"])} if "tool" in each else each)
            for each in data["events"]
        ),
        output=data["output"],
        failure=None if data["failure"] is None else Failure(*data["failure"]),
        seconds=data["seconds"],
    )


def _encode_example(example: Example) -> Json:
    try:
        return plain(example)
    except TypeError:
        # Images and such are only described. If needed, they are read from the dataset again.
        inputs, expected = jsonable(dict(example.inputs)), jsonable(example.expected)
        return {"id": example.id, "inputs": inputs, "expected": expected}
