"""Server-sent events: a stream of JSON objects, as OpenAI's API sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from etude.core.errors import EtudeError
from etude.server.errors import error_object


def streamed(chunks: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """The response that sends each object as an event, and `[DONE]` at the end.

    The status is sent before the first token, so a failure after that is an event with an error object.
    """

    async def events() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield _event(json.dumps(chunk))
        except EtudeError as error:
            yield _event(json.dumps(error_object(500, str(error))))
            return
        yield _event("[DONE]")

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
