"""The routes of requests for tokens, without what FastAPI does on the way to each of its routes."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from etude.server.errors import EXPECTED, api_error


class DirectRoutes:
    """ASGI: an application, of which some routes are entered directly.

    They take the request as it is and give a response: FastAPI's middleware, search for the route and
    dependencies, a tenth of the server's time for a chat, do nothing for them. The application has them too,
    for its documentation.
    """

    def __init__(self, app: FastAPI, router: APIRouter) -> None:
        """Those of `router` are entered directly."""
        self._app = app
        self._routes = {
            (method, route.path): route
            for route in router.routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except Exception as error:
            await api_error(request, error).response(scope["path"])(scope, receive, send)
            if not isinstance(error, EXPECTED):
                raise  # It is logged by `RequestChecks`.
            return
        await response(scope, receive, send)
