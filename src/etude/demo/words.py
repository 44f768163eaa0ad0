"""An episode in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.message import Message

_LINE = 100
_LINES = 8


def episode_in_words(record: EpisodeRecord, score: float | None) -> list[str]:
    """What was said and done, a line each, and how it was scored."""
    lines = list(_lines(record.calls))
    if len(lines) > _LINES:
        left_out = len(lines) - _LINES + 1
        lines = [*lines[: _LINES // 2], f"… {left_out} more …", *lines[len(lines) - _LINES // 2 + 1 :]]
    if record.failure is not None:
        lines.append(f"failed: {record.failure.reason}")
    if record.output is not None and record.output != _last_said(record.calls):
        lines.append(f"outcome: {_short(record.output)}")
    lines.append("no reward" if score is None else f"reward {score:g}")
    return lines


def _lines(calls: Sequence[Call]) -> Iterator[str]:
    seen: tuple[Message, ...] = ()
    for call in calls:
        messages = call.request.messages
        new = messages[len(seen) :] if messages[: len(seen)] == seen else messages
        for message in new:
            if message.get("role") != "assistant":
                yield f"{message.get('role')}: {_short(message.get('content'))}"
        if call.completion is None:
            yield f"no answer: {call.error}"
            seen = messages
            continue
        yield from _answer(call.completion.message)
        seen = (*messages, call.completion.message)


def _last_said(calls: Sequence[Call]) -> object:
    completion = calls[-1].completion if calls else None
    return None if completion is None else completion.message.get("content")


def _answer(message: Message) -> Iterator[str]:
    for tool_call in message.get("tool_calls") or ():
        function = tool_call["function"]
        yield f"agent calls {function['name']}({_arguments(function['arguments'])})"
    if message.get("content"):
        yield f"agent: {_short(message['content'])}"


def _arguments(text: str) -> str:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        return _short(text)
    return ", ".join(f"{name}={value!r}" for name, value in found.items())


def _short(value: object) -> str:
    said = str(value if value is not None else "").strip()
    text = " / ".join(" ".join(line.split()) for line in said.splitlines())
    text = "".join(letter if letter.isprintable() else "·" for letter in text)
    return text if len(text) <= _LINE else f"{text[: _LINE - 1]}…"
