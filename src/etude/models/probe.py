"""Probe messages that show a chat template's syntax, and how it writes tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
"""The tool that the probe answers call."""


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
"""Probe answers by content. Arguments are JSON text, as in OpenAI's format."""

MORE: Message = {"role": "user", "content": "And more?"}
RESULT: Message = {"role": "tool", "tool_call_id": "probe0000", "name": NAME, "content": "A probed result."}


def is_written(answer: Message, text: str) -> bool:
    """Return whether a rendering contains all parts of a probe answer: omitted parts cannot be read back."""
    calls = answer.get("tool_calls") or ()
    parts = [answer["content"], answer.get("reasoning_content", ""), *[ARGUMENTS["text"]] * bool(calls)]
    return all(str(part) in text for part in parts) and text.count(str(ARGUMENTS["text"])) >= len(calls)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around the names and JSON arguments of an answer's tool calls.

    An answer with one call is `prefix NAME between ARGUMENTS suffix` and the end-of-turn token. With two
    calls it is `prefix NAME between ARGUMENTS separator NAME between ARGUMENTS suffix` and that token.
    """

    prefix: str
    """Starts where the prompt ends. In families that always write thinking, it contains an empty thought."""
    between: str
    suffix: str
    separator: str | None
    """None if answers of the family have at most one call."""


def call_form(single: str, double: str | None) -> CallForm | None:
    """Return the form that two renderings show: `single` has one call; `double`, if any, has two.

    Returns None if the arguments are not in the text as JSON.
    """
    match _pieces(single):
        case [prefix, between, suffix]:
            pass
        case _:
            return None
    match _pieces(double or ""):
        case [first, inside, separator, again, _] if [first, inside, again] == [prefix, between, between]:
            return CallForm(prefix, between, suffix, separator)
        case _:
            return CallForm(prefix, between, suffix, None)


def _pieces(text: str) -> list[str]:
    """Return the text between the probe's names and arguments; a single piece if there are none."""
    pieces, rest = [], text
    while NAME in rest:
        before, _, after = rest.partition(NAME)
        start = next((at for at, sign in enumerate(after) if sign == "{" and _json_end(after, at)), None)
        if start is None:
            break
        pieces += [before, after[:start]]
        rest = after[_json_end(after, start) :]
    return [*pieces, rest]


def _json_end(text: str, start: int) -> int:
    """Return the end of the probe's arguments that start at `start`, or 0 if they do not start there."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0
    return end if value == ARGUMENTS else 0
