"""Drift: why a template cannot go on from the tokens of a conversation, and renders it anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.core.errors import EngineError
from etude.core.message import Message, Tool

Render = Callable[[Sequence[Message], Sequence[Tool], bool], str]
"""The text of messages with tools; with the opening of an answer, or without. Raises EngineError."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What of a conversation a template writes differently once there is more of it."""

    message: int | None
    """Index of the message, from 0; None where it is the list of tools."""
    reason: str
    """In words that are the same for all conversations, so that faults can be counted."""

    def __str__(self) -> str:
        return self.reason if self.message is None else f"message {self.message + 1}, {self.reason}"


def fault_of(
    render: Render,
    spoken: Sequence[Message],
    tools_then: Sequence[Tool],
    messages: Sequence[Message],
    tools_now: Sequence[Tool],
) -> Fault:
    """Why `messages` with `tools_now`, which begin with those `spoken` with `tools_then`, do not extend them.

    The last one spoken is the answer whose tokens could not be gone on from.
    """
    if list(tools_then) != list(tools_now):
        return Fault(None, "tools: other ones than before are offered")
    now = render(messages, tools_now, False)
    asked, closed = render(spoken[:-1], tools_then, True), render(spoken, tools_then, False)
    for then, seen in ((asked, spoken[:-1]), (closed, spoken)):
        changed = _common(then, now)
        for index, message in enumerate(seen):
            # A rendering may end in what is only written at the end of all: that is not the message's.
            if changed < _common(_text(render, seen[: index + 1], tools_then), then):
                return Fault(index, f"role {_kind(message)}: rewritten once the conversation goes on")
    return Fault(len(spoken) - 1, f"role {_kind(spoken[-1])}: not written as it is asked for")


def _text(render: Render, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Empty where the template refuses a part of a conversation."""
    try:
        return render(messages, tools, False)
    except EngineError:
        return ""


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common from the start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _kind(message: Message) -> str:
    role = str(message.get("role"))
    thinks = message.get("reasoning_content") or "</think>" in str(message.get("content"))
    parts = ["thinking"] * bool(thinks) + ["tool calls"] * bool(message.get("tool_calls"))
    return f"{role} with {' and '.join(parts)}" if parts else role
