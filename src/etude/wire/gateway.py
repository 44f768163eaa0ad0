"""The APIs that agents speak, over a callable that makes and records the calls."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from etude.core.errors import EngineError, EtudeError, RequestError
from etude.wire.chat_dialect import ChatDialect
from etude.wire.dialect import ChatBody, Dialect, Event, RecordedCompletion
from etude.wire.messages_dialect import MessagesDialect
from etude.wire.responses_dialect import ResponsesDialect
from etude.wire.said import Said

Handler: TypeAlias = Callable[[ChatBody], Awaitable[RecordedCompletion]]
"""Makes and records the call that a request asks for. Raises RequestError when the request is wrong,
EngineError when the model has no answer, another EtudeError when no calls may be made any more."""

FUNCTION_HEADER = "x-etude-function"
"""Request header: the function of the agent that makes the call."""

ERROR_HEADER = "x-etude-error"
"""Response header: the class of the error that is behind a status of 400 or more."""


@dataclass(frozen=True, slots=True)
class WireResponse:
    """An HTTP response."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


class Gateway:
    """Chat completions, the Responses API and Anthropic's messages for one episode.

    It remembers the episode's answers, so that a conversation that comes back in an API's own words is
    the one that was recorded.
    """

    def __init__(self, handler: Handler, said: Said | None = None) -> None:
        """`said` is shared by all gateways of an episode."""
        self._handler = handler
        self._dialects = dialects(said or Said())

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> WireResponse:
        """Answer one HTTP request.

        All errors come back as the API's error object, and tell its client not to retry: what could be
        retried has been retried by the engine.
        """
        path = plain_path(path)
        dialect = self._dialects.get(path)
        if dialect is None or method != "POST":
            return error_response(
                path,
                404,
                f"{method} {path} is not recorded; recorded are POST {', '.join(self._dialects)}",
                code="not_found",
            )
        try:
            data = json.loads(body)
        except ValueError as error:
            return error_response(path, 400, f"the request is not JSON: {error}")
        try:
            asked = dialect.parse(data)
            recorded = await self._handler(replace(asked, function=headers.get(FUNCTION_HEADER)))
        except RequestError as error:
            return error_response(path, 400, str(error), cause=error)
        except EngineError as error:
            return error_response(path, 500, str(error), kind="server_error", cause=error)
        except EtudeError as error:
            return error_response(path, 409, str(error), kind="conflict_error", cause=error)
        return _success(dialect, recorded, asked, data)


def dialects(said: Said) -> dict[str, Dialect]:
    """The dialects, by the path of their requests without `/v1`."""
    return {
        "/chat/completions": ChatDialect(),
        "/responses": ResponsesDialect(said),
        "/messages": MessagesDialect(said),
    }


def plain_path(path: str) -> str:
    """The path without `/v1`, however often clients put it before."""
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return path


def error_response(
    path: str,
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    cause: EtudeError | None = None,
) -> WireResponse:
    """The error object of the API that a path belongs to, with its status; `kind` is OpenAI's."""
    headers = {"content-type": "application/json", "x-should-retry": "false"}
    if cause is not None:
        headers[ERROR_HEADER] = type(cause).__name__
    dialect = dialects(Said()).get(plain_path(path)) or ChatDialect()
    return WireResponse(status, _dumps(dialect.error(message, kind=kind, code=code)), headers)


def _success(dialect: Dialect, recorded: RecordedCompletion, asked: ChatBody, body: Any) -> WireResponse:
    """The completion as JSON, or as server-sent events when the request asked for a stream."""
    created = int(time.time())
    if not asked.stream:
        return WireResponse(200, _dumps(dialect.reply(recorded, asked, body, created)))
    events = _server_sent(dialect.events(recorded, asked, body, created))
    return WireResponse(200, events, {"content-type": "text/event-stream"})


def _server_sent(events: Iterable[Event]) -> bytes:
    lines = []
    for name, data in events:
        if name is not None:
            lines.append(b"event: " + name.encode() + b"\n")
        lines.append(b"data: " + (data.encode() if isinstance(data, str) else _dumps(data)) + b"\n\n")
    return b"".join(lines)


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()
