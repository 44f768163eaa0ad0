"""What the model said in an episode, to be known again when a client sends it back in another form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from etude.core.message import Message, text_of

RAW = "raw_arguments"
"""Stands for the arguments of a tool call that are no JSON object, where an API takes only objects."""


class Said:
    """The model's messages as it said them.

    A translation back and forth loses details (spaces in a tool call's arguments, fields that an API
    does not have). With the message as it was, the prompt extends the tokens that were sampled.
    """

    def __init__(self) -> None:
        self._messages: dict[str, Message] = {}
        self.conversations: dict[str, tuple[Message, ...]] = {}
        """What was said up to an answer, and the answer, by the answer's name."""

    def add(self, message: Message) -> None:
        """Remember a message of the model."""
        self._messages[_key(message)] = message

    def as_said(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """The messages, each of the assistant's that is known as the model said it."""
        return tuple(
            self._messages.get(_key(one), one) if one["role"] == "assistant" else one for one in messages
        )


def arguments_object(arguments: str) -> dict[str, Any]:
    """The arguments of a tool call as an object; what is none is kept under `raw_arguments`."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {RAW: arguments}


def arguments_text(arguments: dict[str, Any]) -> str:
    """The reverse of `arguments_object`, but for spaces."""
    raw = arguments.get(RAW)
    return raw if len(arguments) == 1 and isinstance(raw, str) else json.dumps(arguments, ensure_ascii=False)


def _key(message: Message) -> str:
    calls = [
        [call.get("id"), call["function"]["name"], arguments_object(str(call["function"]["arguments"]))]
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps([text_of(message), calls], sort_keys=True)
