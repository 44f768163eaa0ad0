"""The APIs that agents speak, over a callable that makes and records the calls."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pydantic_core import from_json

from etude.core.errors import EngineError, EtudeError, RequestError
from etude.wire.chat import ChatDialect
from etude.wire.dialect import AnswerMemory, ChatBody, Dialect, RecordedCompletion, server_sent
from etude.wire.messages import MessagesDialect
from etude.wire.responses import ResponsesDialect

Handler: TypeAlias = Callable[[ChatBody], Awaitable[RecordedCompletion]]
"""Makes and records the call that a request asks for. Raises RequestError when the request is wrong,
EngineError when the model has no answer, another EtudeError when no calls may be made any more."""

FUNCTION_HEADER = "x-etude-function"
"""Request header: the function of the agent that makes the call."""

ERROR_HEADER = "x-etude-error"
"""Response header: the class of the error that is behind a status of 400 or more."""

_DIALECTS: Mapping[str, type[Dialect]] = {
    "/chat/completions": ChatDialect,
    "/responses": ResponsesDialect,
    "/messages": MessagesDialect,
}
"""By the path of their requests without `/v1`."""


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

    def __init__(self, handler: Handler, memory: AnswerMemory | None = None) -> None:
        """`memory` is shared by all gateways of an episode."""
        self._handler = handler
        memory = memory or AnswerMemory()
        self._dialects = {path: dialect(memory) for path, dialect in _DIALECTS.items()}

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> WireResponse:
        """Answer one HTTP request.

        All errors come back as the API's error object, and tell its client not to retry: what could be
        retried has been retried by the engine.
        """
        path = _plain_path(path)
        dialect = self._dialects.get(path)
        if dialect is None or method != "POST":
            message = f"{method} {path} is not recorded; recorded are POST {', '.join(_DIALECTS)}"
            return error_response(path, 404, message, code="not_found")
        try:
            data = from_json(body)
        except ValueError as error:
            return error_response(path, 400, f"the request is not JSON: {error}")
        try:
            asked = dialect.parse(data)
            recorded = await self._handler(replace(asked, function=headers.get(FUNCTION_HEADER)))
        except EtudeError as error:
            refused = 400 if isinstance(error, RequestError) else 409
            status = 500 if isinstance(error, EngineError) else refused
            return error_response(path, status, str(error), cause=error)
        reply = dialect.reply(recorded, asked, data, int(time.time()))
        if not asked.stream:
            return WireResponse(200, json.dumps(reply).encode())
        events = b"".join(server_sent(data, name) for name, data in dialect.events(reply, asked))
        return WireResponse(200, events, {"content-type": "text/event-stream"})


def error_response(
    path: str, status: int, message: str, *, code: str | None = None, cause: EtudeError | None = None
) -> WireResponse:
    """The error object of the API that a path belongs to, with its status."""
    headers = {"content-type": "application/json", "x-should-retry": "false"}
    if cause is not None:
        headers[ERROR_HEADER] = type(cause).__name__
    error = _DIALECTS.get(_plain_path(path), ChatDialect).error(status, message, code)
    return WireResponse(status, json.dumps(error).encode(), headers)


def _plain_path(path: str) -> str:
    """The path without `/v1`, however often clients put it before."""
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return path
