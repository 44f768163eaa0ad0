"""A gate that demands vLLM's key on every path but `/health`; vLLM itself guards only `/v1`.

It runs in vLLM's process, whose Python may lack Etude, so it imports only the standard library.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

_OPEN = "/health"


class Gate:
    """ASGI middleware for `vllm serve --middleware`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer 401 to requests without the key."""
        if scope["type"] in ("http", "websocket") and scope["path"] != _OPEN:
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, self._expected):
                await _refuse(scope["type"], send)
                return
        await self._app(scope, receive, send)


async def _refuse(kind: str, send: Any) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
