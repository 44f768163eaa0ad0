"""Roles as a chat template can write them: no system message is lost, and each keeps its place.

Agents send several system messages, some of the role `developer` and some in mid-conversation. Templates
differ in those that they refuse, leave out or move to the beginning, and probes show which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby

from etude.core.message import Message, Tool
from etude.models.probe import MORE, PROBES, QUESTION, RESULT, TOOL

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
        return self._in_turn([*first, *later])

    @property
    def way(self) -> str:
        """How system messages are written."""
        if not self._takes_first:
            return "in the user's turns"
        first = "as they are" if self._takes_several else "the first ones as one"
        return first if self._takes_later else f"{first}, later ones in the user's turns"

    def _in_turn(self, messages: list[Message]) -> list[Message]:
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
