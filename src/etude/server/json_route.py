"""Routes of FastAPI's whose bodies are JSON within the limits of all JSON from outside."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from etude.core.json_text import read_json
from etude.core.threads import beside_loop
from etude.wire.http_server import ApiError


class JsonRequest(Request):
    """A request whose JSON is read within limits, and beside the event loop where there is much of it."""

    async def json(self) -> Any:
        """The body's value. Raises ApiError."""
        body = await self.body()
        try:
            return await beside_loop(len(body), read_json, body)
        except ValueError as error:
            raise ApiError(400, f"the request is not JSON: {error}", code="invalid_value") from error


class JsonRoute(APIRoute):
    """A route that takes such requests, to be named as the `route_class` of a router."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, for a `JsonRequest`."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
