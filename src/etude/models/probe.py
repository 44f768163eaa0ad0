"""Probes: a question and answers of every kind, which a chat template writes to show its syntax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etude.core.message import Message, Tool

QUESTION: Message = {"role": "user", "content": "A probed question?"}
NAME, ARGUMENTS = "probed_name", {"count": 1, "text": "probed value"}
LINES = 'probed value\nIt\'s a \\new "line".'
THOUGHT, ANSWER = "A probed thought", "A probed answer."

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "description": "A probed number."},
                "text": {"type": "string", "description": "A probed text."},
            },
            "required": ["count", "text"],
        },
    },
}
"""The tool that the probed answers call."""


def _answer(
    content: str = "", thinking: str = "", calls: int = 0, arguments: Mapping[str, Any] = ARGUMENTS
) -> Message:
    function = {"name": NAME, "arguments": json.dumps(arguments)}
    made = [{"id": f"probe{index:04d}", "type": "function", "function": function} for index in range(calls)]
    thought = {"reasoning_content": thinking} if thinking else {}
    return {"role": "assistant", "content": content, **thought, **({"tool_calls": made} if calls else {})}


PROBES: Mapping[str, Message] = {
    "text": _answer(ANSWER),
    "a call": _answer(calls=1),
    "thinking": _answer(ANSWER, THOUGHT),
    "thinking and a call": _answer(thinking=THOUGHT, calls=1),
    "text and a call": _answer(ANSWER, calls=1),
    "two calls": _answer(calls=2),
    "several lines of text": _answer(calls=1, arguments={**ARGUMENTS, "text": LINES}),
}
"""Answers, by what is in them. Arguments are JSON text, as in OpenAI's format."""

MORE: Message = {"role": "user", "content": "And more?"}
RESULT: Message = {"role": "tool", "tool_call_id": "probe0000", "name": NAME, "content": "A probed result."}

CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    (QUESTION, PROBES["text"], MORE),
    (QUESTION, PROBES["thinking"], MORE),
    (QUESTION, PROBES["a call"], RESULT),
    (QUESTION, PROBES["thinking and a call"], RESULT),
    (QUESTION, PROBES["a call"], RESULT, PROBES["text"], MORE),
    (QUESTION, PROBES["thinking and a call"], RESULT, PROBES["text"], MORE),
)
"""Conversations that go on after an answer."""


def is_written(answer: Message, text: str) -> bool:
    """Whether a rendering has all of a probed answer: what a template leaves out cannot be read back."""
    calls = answer.get("tool_calls") or ()
    parts = [answer["content"], answer.get("reasoning_content", ""), *[ARGUMENTS["text"]] * bool(calls)]
    return all(str(part) in text for part in parts) and text.count(str(ARGUMENTS["text"])) >= len(calls)
