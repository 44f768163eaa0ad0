"""An episode turn by turn, as a page shows it: what was said, what tools did, and what happened between."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from etude.core.call import Call, continues
from etude.core.episode import WORKFLOW, EpisodeRecord, Event
from etude.core.message import Message, is_text, text_of
from etude.store.plain import jsonable

_PIECES = re.compile(r"\s+|\w+|[^\w\s]")
_MOST_PIECES = 4000
"""Of a text that is compared word by word; longer ones are compared line by line."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model called."""

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing that was said or that happened."""

    kind: str
    """A role, `event` or `failure`."""
    who: str
    text: str = ""
    thinking: str = ""
    tools: tuple[ToolCall, ...] = ()
    call: int | None = None
    """Index of the call that it is the answer of."""
    marks: tuple[str, ...] = ()
    """Facts in a word or two."""
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """The same turn of two episodes: pieces of text, each with `same`, `cut` or `add`."""

    before: Turn | None
    after: Turn | None
    pieces: list[tuple[str, str]] = field(default_factory=list)


def turns_of(record: EpisodeRecord) -> list[Turn]:
    """The turns of an episode. Of a call that goes on from an earlier one, only what is new."""
    turns = [_event(event) for event in record.events if event.after_call < 0]
    events: dict[int, list[Event]] = {}
    for event in record.events:
        events.setdefault(event.after_call, []).append(event)
    for position, call in enumerate(record.calls):
        turns += _call(call, record.calls[:position])
        turns += [_event(event) for event in events.get(call.index, ())]
    if record.failure is not None:
        turns.append(Turn("failure", record.failure.kind, record.failure.reason, is_bad=True))
    return turns


def _call(call: Call, before: Sequence[Call]) -> Iterator[Turn]:
    messages = call.request.messages
    earlier = next((other for other in reversed(before) if continues(messages, other)), None)
    known = 0 if earlier is None else len(earlier.request.messages) + 1
    for message in messages[known:]:
        yield _said(message, str(message.get("role")))
    marks = []
    if earlier is not None and earlier is not before[-1]:
        marks.append(f"goes on from call {earlier.index}")
    who = call.model if call.function == WORKFLOW else call.function
    if call.completion is None:
        yield Turn(
            "failure", who, call.error or "no answer", call=call.index, marks=tuple(marks), is_bad=True
        )
        return
    answer = call.completion
    if answer.finish_reason == "length":
        marks.append("cut off")
    if answer.drifted:
        marks.append(f"drifted: {answer.fault or 'the template wrote the prompt anew'}")
    if call.retries:
        marks.append(f"asked {call.retries + 1} times")
    version = "from a log" if call.logged else f"v{answer.model_version}"
    yield _said(answer.message, who, call.index, (version, *marks))


def _said(message: Message, who: str, call: int | None = None, marks: Sequence[str] = ()) -> Turn:
    content = message.get("content")
    text = text_of(message) if is_text(message) else str(jsonable(content))
    tools = tuple(map(_tool_call, message.get("tool_calls") or ()))
    role = str(message.get("role") or "other")
    thinking = str(message.get("reasoning_content") or "")
    return Turn(role, who, text, thinking, tools, call, tuple(marks))


def _tool_call(wire: Any) -> ToolCall:
    function = wire.get("function") if isinstance(wire, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    return ToolCall(str(function.get("name")), function.get("arguments"))


def _event(event: Event) -> Turn:
    whose = "" if event.agent is None else f" of {event.agent}"
    if event.tool is not None:
        use, is_bad = event.tool, event.tool.outcome != "ok"
        marks = (use.outcome, f"{use.seconds:.2f} s") if is_bad else (f"{use.seconds:.2f} s",)
        return Turn("event", f"tool {use.name}", use.result if is_bad else "", marks=marks, is_bad=is_bad)
    if event.kind in ("step_reward", "score"):
        name = event.name or "step reward"
        return Turn(
            "event",
            f"{name}{whose}",
            event.text,
            marks=(f"{event.value:g}",) if event.value is not None else (),
        )
    return Turn("event", f"{event.kind}{whose}", event.text)


def differences(before: Sequence[Turn], after: Sequence[Turn]) -> list[Difference]:
    """Two episodes turn by turn, with what differs in the texts."""
    return [
        Difference(old, new, [] if old is None or new is None else differing(_whole(old), _whole(new)))
        for old, new in zip_longest(before, after)
    ]


def _whole(turn: Turn) -> str:
    calls = "".join(f"\n{tool.name}({tool.arguments})" for tool in turn.tools)
    return f"{turn.thinking}\n{turn.text}{calls}".strip()


def differing(before: str, after: str) -> list[tuple[str, str]]:
    """Pieces of both texts in order, each with `same`, `cut` (only before) or `add` (only after)."""
    old, new = _PIECES.findall(before), _PIECES.findall(after)
    if max(len(old), len(new)) > _MOST_PIECES:
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    pieces: list[tuple[str, str]] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            pieces.append(("same", "".join(old[i:j])))
            continue
        pieces += [("cut", "".join(old[i:j]))] if j > i else []
        pieces += [("add", "".join(new[k:m]))] if m > k else []
    return pieces
