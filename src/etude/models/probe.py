"""Probes, which a chat template writes to show its syntax; and what is read off it: calls and roles.

Agents send several system messages, some of the role `developer` and some in mid-conversation. Templates
differ in those that they refuse, leave out or move to the beginning: no system message is lost here, and each
keeps its place.
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


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around the names and the JSON arguments of the tool calls of one answer.

    An answer with one call is `prefix NAME between ARGUMENTS suffix` and the token that ends the turn; with
    two calls it is `prefix NAME between ARGUMENTS separator NAME between ARGUMENTS suffix`.
    """

    prefix: str
    """Begins where the prompt ends. Of a family that always writes its thinking, an empty one is in it."""
    between: str
    suffix: str
    separator: str | None
    """None where an answer of the family has one call only."""


def call_form(single: str, double: str | None) -> CallForm | None:
    """The form that two renderings show: of an answer with one call, and of one with two calls or None.

    None where the arguments do not stand in the text as JSON.
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
    """The text between the probed names and arguments; a single piece where there is none."""
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
    """Where the probed arguments end that start at `start`; 0 if they do not stand there."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0
    return end if value == ARGUMENTS else 0


MARKED = "<system>\n{}\n</system>"
"""A later system message as a part of the user's turn."""
_RULE: Message = {"role": "system", "content": "A probed rule."}
_SECOND: Message = {"role": "system", "content": "A second probed rule."}
_ANSWER, _CALL = PROBES["text"], PROBES["a call"]


class Roles:
    """The messages that a template takes, besides turns of user and assistant by turns."""

    def __init__(
        self,
        write: Callable[[Sequence[Message], Sequence[Tool]], str | None],
        end_of_turn: Callable[[str, str, str], tuple[int, int] | None],
    ) -> None:
        """`write` gives the template's own rendering of messages and tools, None where it refuses them.

        `end_of_turn` is `Rendering.end_of_turn`.
        """
        self._write = write
        self._end_of_turn = end_of_turn

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, whose contents are text, in roles that the template writes, in the same order.

        Developers speak as the system does. Of what the template does not take so, the first system messages
        become one, or else the beginning of the user's turn; later ones become `<system>` in a turn of the
        user; and turns of the user that follow each other become one.
        """
        spoken = [message | {"role": "system"} if is_system(message) else message for message in messages]
        start = next((at for at, message in enumerate(spoken) if not is_system(message)), len(spoken))
        first, later = spoken[:start], spoken[start:]
        if any(map(is_system, later)) and not self._takes_later:
            later = [_as_user(MARKED, message) if is_system(message) else message for message in later]
        if len(first) > 1 and not self._takes_several:
            first = [_joined(first)]
        if first and not (self._takes_first if later and later[0]["role"] == "user" else self._takes_alone):
            first = [_as_user("{}", message) for message in first]
            if later and later[0]["role"] == "user":
                first, later = [_joined([*first, later[0]])], later[1:]
        messages = [*first, *later]
        runs = [(role, [*run]) for role, run in groupby(messages, key=lambda message: message.get("role"))]
        if all(role != "user" or len(run) == 1 for role, run in runs) or self._takes_users:
            return messages
        return [
            message
            for role, run in runs
            for message in ([_joined(run)] if role == "user" and len(run) > 1 else run)
        ]

    @cached_property
    def _takes_first(self) -> bool:
        """One system message before the user's."""
        return self._takes([_RULE, QUESTION]) and self._takes([_RULE, QUESTION, _ANSWER, MORE])

    @cached_property
    def _takes_alone(self) -> bool:
        """One without a message of the user after it."""
        return self._takes([_RULE])

    @cached_property
    def _takes_several(self) -> bool:
        """Several of them before the user's, with tools as well."""
        return all(self._takes([_RULE, _SECOND, QUESTION], tools) for tools in ((), (TOOL,)))

    @cached_property
    def _takes_later(self) -> bool:
        """System messages in mid-conversation, after which it goes on as after the user's.

        GLM's models end their turns with the mark of the user's, after which no system message can come.
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
        """Two turns of the user, one after the other."""
        return self._takes([QUESTION, MORE]) and self._takes([QUESTION, _ANSWER, QUESTION, MORE])

    def _takes(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        """Whether each message is written after the one before it, and the second rule not as a user's.

        Llama 3.1 with tools takes whatever comes after the first rule for the user's.
        """
        text = self._write(messages, tools)
        if text is None or left_out(messages, text):
            return False
        as_user = [_as_user("{}", message) if message is _SECOND else message for message in messages]
        return _SECOND not in messages or self._write(as_user, tools) != text


def is_system(message: Message) -> bool:
    """Whether a message is the system's, or of the developer, who speaks as the system does."""
    return message.get("role") in ("system", "developer")


def left_out(messages: Sequence[Message], text: str) -> list[int]:
    """Of messages other than the assistant's, the indices of those that are not in the text in this order."""
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


def _joined(messages: Sequence[Message]) -> Message:
    return {
        "role": messages[-1]["role"],
        "content": "\n\n".join(message["content"] for message in messages),
    }
