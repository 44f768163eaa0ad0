"""Probe messages that show a chat template's syntax: how it writes tool calls, and which roles it accepts.

Agents send several system messages, some with the role `developer`, some in mid-conversation. Templates
differ in which of them they refuse, omit or move to the beginning. Etude loses no system message and keeps
each in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
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


MARKED = "<system>\n{}\n</system>"
"""The form of a later system message inside a user turn."""
_RULE: Message = {"role": "system", "content": "A probed rule."}
_SECOND: Message = {"role": "system", "content": "A second probed rule."}
_ANSWER, _CALL = PROBES["text"], PROBES["a call"]


class RoleSupport:
    """The messages that a template accepts, besides alternating user and assistant turns."""

    def __init__(
        self,
        write: Callable[[Sequence[Message], Sequence[Tool]], str | None],
        end_of_turn: Callable[[str, str, str], tuple[int, int] | None],
    ) -> None:
        """`write` returns the template's own rendering of messages and tools, or None if it refuses them.

        `end_of_turn` is `Rendering.end_of_turn`.
        """
        self._write = write
        self._end_of_turn = end_of_turn

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, in the same order, with roles that the template writes; contents are text.

        The role `developer` becomes `system`, and the first system messages become one, or start the user's
        turn if the template cannot write them. Later ones that it cannot write become `<system>` blocks in a
        user turn. Consecutive user turns that it cannot write become one.
        """
        spoken = [message | {"role": "system"} if is_system(message) else message for message in messages]
        start = next((at for at, message in enumerate(spoken) if not is_system(message)), len(spoken))
        first, later = spoken[:start], spoken[start:]
        if any(map(is_system, later)) and not self._takes_later:
            later = [_as_user(MARKED, message) if is_system(message) else message for message in later]
        if len(first) > 1:
            first = [_join(first)]
        if first and not self._takes_first:
            first = [_as_user("{}", first[0])]
            if later and later[0]["role"] == "user":
                first, later = [_join([*first, later[0]])], later[1:]
        messages = [*first, *later]
        runs = [(role, [*run]) for role, run in groupby(messages, key=lambda message: message.get("role"))]
        if all(role != "user" or len(run) == 1 for role, run in runs) or self._takes_users:
            return messages
        return [
            message
            for role, run in runs
            for message in ([_join(run)] if role == "user" and len(run) > 1 else run)
        ]

    @cached_property
    def _takes_first(self) -> bool:
        """Whether it accepts one system message before the user's."""
        return self._takes([_RULE, QUESTION]) and self._takes([_RULE, QUESTION, _ANSWER, MORE])

    @cached_property
    def _takes_later(self) -> bool:
        """Whether it accepts system messages in mid-conversation and continues as after a user message.

        GLM models end their turns with the user's marker, after which no system message can follow.
        """
        cycle = [QUESTION, _CALL, RESULT]
        return (
            all(
                self._takes([*before, _SECOND, *after])
                for before in ([QUESTION], [QUESTION, _ANSWER], [_RULE, QUESTION, _ANSWER])
                for after in ([], [MORE])
            )
            and (self._takes([*cycle, _SECOND], (TOOL,)) or not self._takes(cycle, (TOOL,)))
            and (self._ends_turn_before(_SECOND) or not self._ends_turn_before(MORE))
        )

    def _ends_turn_before(self, message: Message) -> bool:
        texts = [self._write([QUESTION, _ANSWER, message][:length], ()) for length in (1, 2, 3)]
        asked, closed, longer = (text or "" for text in texts)
        return self._end_of_turn(asked, closed, longer) is not None

    @cached_property
    def _takes_users(self) -> bool:
        """Whether it accepts two consecutive user turns."""
        return self._takes([QUESTION, MORE]) and self._takes([QUESTION, _ANSWER, QUESTION, MORE])

    def _takes(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        """Return whether all messages are written, in order, and the second rule not as a user message.

        With tools, Llama 3.1 writes any message after the first rule as the user's.
        """
        text = self._write(messages, tools)
        if text is None or left_out(messages, text):
            return False
        as_user = [_as_user("{}", message) if message is _SECOND else message for message in messages]
        return _SECOND not in messages or self._write(as_user, tools) != text


def is_system(message: Message) -> bool:
    """Return whether a message has the role `system`, or `developer`, which Etude treats alike."""
    return message.get("role") in ("system", "developer")


def left_out(messages: Sequence[Message], text: str) -> list[int]:
    """Return the indices of non-assistant messages that the text does not contain in this order."""
    missing, end = [], 0
    for index, message in enumerate(messages):
        content = "" if message.get("role") == "assistant" else str(message["content"]).strip()
        start = text.find(content, end)
        if start < 0:
            missing.append(index)
        else:
            end = start + len(content)
    return missing


def _as_user(form: str, message: Message) -> Message:
    return {"role": "user", "content": form.format(message["content"])}


def _join(messages: Sequence[Message]) -> Message:
    return {"role": messages[-1]["role"], "content": "\n\n".join(message["content"] for message in messages)}
