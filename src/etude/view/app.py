"""The view's application: its addresses, its access control, and its server.

The link that `etude view` prints has a key. Opening it sets a cookie with the key, and leads on without it.
"""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.core.errors import EtudeError, RequestError
from etude.view import episodes, runs
from etude.view.pages import STATIC, page, url
from etude.wire.http_server import ApiError, RequestChecks, is_key, listen, require_own_name, server_config

KEY = "open"
"""The link's parameter with the key. A parameter called `key` would be masked in output."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of every answer: only the view's own scripts, styles and pictures, and no page around it."""


class Gate:
    """ASGI middleware that lets in requests with the key, and refuses everything except reading."""

    def __init__(self, app: ASGIApp, key: str, port: int) -> None:
        self._app = app
        self._key = key
        # Cookies do not depend on the port: without it, two views on one machine would share theirs.
        self._cookie = f"etude-view-{port}"
        self._checked = RequestChecks(self._answer, self._check, max_body=lambda path: 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._checked(scope, receive, send_on)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise ApiError(405, "the view shows runs and changes nothing")
        require_own_name(headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        given = request.query_params.get(KEY)
        if given is not None and is_key(given, self._key):
            rest = [(name, value) for name, value in request.query_params.multi_items() if name != KEY]
            path = request.url.path.lstrip("/")
            answer = RedirectResponse(f"/{path}" + (f"?{urlencode(rest)}" if rest else ""), 303)
            answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict", path="/")
            await answer(scope, receive, send)
        elif is_key(request.cookies.get(self._cookie, ""), self._key):
            await self._app(scope, receive, send)
        else:
            closed = "This view opens with the link that `etude view` has printed. Copy the whole of it."
            await PlainTextResponse(f"{closed}\n", 401)(scope, receive, send)


_PAGES: dict[str, Callable[[Request], Response]] = {
    "/": runs.list_page,
    "/runs/{run}": runs.run_page,
    "/runs/{run}/now": runs.now_page,
    "/runs/{run}/config": runs.config_page,
    "/runs/{run}/phases": episodes.phases_page,
    "/runs/{run}/phases/{phase:path}": episodes.phase_page,
    "/runs/{run}/groups/{id:path}": episodes.group_page,
    "/runs/{run}/episodes/{id:path}": episodes.episode_page,
    "/runs/{run}/tokens/{id:path}": episodes.tokens_page,
    "/runs/{run}/chunks/{id:path}": episodes.chunk_page,
}


def create_view(root: Path, key: str, *, port: int = 0) -> Gate:
    """Make the view of the runs in a folder, behind a gate that requires the key."""
    app = Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=STATIC)),
            *(Route(path, answer) for path, answer in _PAGES.items()),
        ],
        exception_handlers=dict.fromkeys((HTTPException, RequestError, EtudeError), _problem),
    )
    app.state.root = root
    return Gate(app, key, port)


def _problem(request: Request, error: Exception) -> Response:
    """Return the page that says why nothing is shown."""
    status, title, text = 404, "There is no such page", str(error)
    if isinstance(error, HTTPException):
        status, text = error.status_code, f"nothing is shown at {request.url.path}"
    elif not isinstance(error, RequestError):
        status, title = 500, "This cannot be read"
    return page(request, "problem.html", status, title=title, text=text)


PORT = 7331
"""Taken if it is free, so that addresses stay the same from day to day."""


def serve_view(
    root: Path, on_ready: Callable[[str, str], None], *, run: str | None = None, port: int | None = None
) -> None:
    """Show the runs in a folder until a signal. `on_ready` gets address and key. Raises RequestError."""
    import uvicorn

    try:
        socket_of_view = listen("127.0.0.1", PORT if port is None else port)
    except RequestError:
        if port is not None:
            raise
        socket_of_view = listen("127.0.0.1", 0)
    with socket_of_view as listening:
        port, key = listening.getsockname()[1], secrets.token_urlsafe(24)
        server = uvicorn.Server(server_config(create_view(root, key, port=port), log_level="warning"))
        # The socket listens already: a request waits until the server runs.
        on_ready(f"http://127.0.0.1:{port}{url('runs', run) if run else '/'}", key)
        server.run(sockets=[listening])
