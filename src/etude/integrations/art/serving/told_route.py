"""Routes whose refusals are logged: ART's clients tell their users nothing, or nothing but the status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from etude.server.errors import ApiError, problems_of

_LOG = logging.getLogger("etude.server")


class ToldRoute(APIRoute):
    """Logs why a request was refused."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, and what it raises in the log."""
        handle = super().get_route_handler()

        async def handle_and_tell(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                _LOG.warning("%s: %s", request.url.path, error.detail)
                raise
            except RequestValidationError as error:
                _LOG.warning("%s: %s", request.url.path, problems_of(error.errors())[0])
                raise

        return handle_and_tell
