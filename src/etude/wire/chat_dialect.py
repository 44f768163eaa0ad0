"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from etude.wire.dialect import ChatBody, Event, RecordedCompletion
from etude.wire.openai_format import (
    completion_to_chunks,
    completion_to_wire,
    error_to_wire,
    parse_chat_body,
)


class ChatDialect:
    """`POST /chat/completions`: nothing is translated."""

    def parse(self, body: Any) -> ChatBody:
        """See Dialect."""
        return parse_chat_body(body)

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """See Dialect."""
        return completion_to_wire(recorded, asked, created=created)

    def events(
        self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int
    ) -> Iterator[Event]:
        """See Dialect."""
        for chunk in completion_to_chunks(recorded, asked, created=created):
            yield None, chunk
        yield None, "[DONE]"

    def error(self, message: str, *, kind: str, code: str | None) -> dict[str, Any]:
        """See Dialect."""
        return error_to_wire(message, kind=kind, code=code)
