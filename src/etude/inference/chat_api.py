"""OpenAI's chat completions API over a callable: what the recording client and the endpoint answer."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from etude.core.errors import EngineError, EtudeError, RequestError
from etude.inference.openai_format import (
    ChatBody,
    RecordedCompletion,
    completion_to_chunks,
    completion_to_wire,
    error_to_wire,
    parse_chat_body,
)

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


async def answer(
    handler: Handler, method: str, path: str, headers: Mapping[str, str], body: bytes
) -> WireResponse:
    """Answer one HTTP request; `path` without the leading `/v1`.

    All errors come back as OpenAI's error object, and tell its client not to retry: what could be
    retried has been retried by the engine.
    """
    if (method, path) != ("POST", "/chat/completions"):
        return error_response(
            404,
            f"{method} {path} is not recorded; only chat completions are (client.chat.completions.create)",
            code="not_found",
        )
    try:
        data = json.loads(body)
    except ValueError as error:
        return error_response(400, f"the request is not JSON: {error}")
    try:
        parsed = parse_chat_body(data)
        recorded = await handler(replace(parsed, function=headers.get(FUNCTION_HEADER)))
    except RequestError as error:
        return error_response(400, str(error), cause=error)
    except EngineError as error:
        return error_response(500, str(error), kind="server_error", cause=error)
    except EtudeError as error:
        return error_response(409, str(error), kind="conflict_error", cause=error)
    return success_response(recorded, parsed)


def success_response(recorded: RecordedCompletion, body: ChatBody) -> WireResponse:
    """The completion as JSON, or as server-sent events when the request asked for a stream."""
    created = int(time.time())
    if not body.stream:
        return WireResponse(200, _dumps(completion_to_wire(recorded, body, created=created)))
    events = b"".join(_events(completion_to_chunks(recorded, body, created=created)))
    return WireResponse(200, events, {"content-type": "text/event-stream"})


def error_response(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    cause: EtudeError | None = None,
) -> WireResponse:
    """OpenAI's error object with its status."""
    headers = {"content-type": "application/json", "x-should-retry": "false"}
    if cause is not None:
        headers[ERROR_HEADER] = type(cause).__name__
    return WireResponse(status, _dumps(error_to_wire(message, kind=kind, code=code)), headers)


def _events(chunks: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    for chunk in chunks:
        yield b"data: " + _dumps(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()
