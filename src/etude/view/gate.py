"""The gate in front of the view: who may look, and what a browser may do with the pages.

The link that `etude view` prints has a key. Whoever opens it is given a cookie with the key, and the address
without it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.wire.http_server import ApiError, RequestChecks, is_key, require_own_name

KEY = "open"
"""The parameter of the link that has the key. Output masks those that are called `key`."""

_OPEN = frozenset({"/health"})
_METHODS = frozenset({"GET", "HEAD"})
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Of every answer: no script, style or picture but the view's own, and no page around it."""


class Gate:
    """ASGI middleware that lets in who has the key, and answers nothing but questions."""

    def __init__(self, app: ASGIApp, key: str, host: str, port: int, *, shared: bool = False) -> None:
        """`shared`: it may be reached under any name, as it is beyond this machine."""
        self._app = app
        self._key = key
        self._host = host
        self._shared = shared
        # Cookies are not told apart by port: two views on one machine would take each other's.
        self._cookie = f"etude-view-{port}"
        self._checked = RequestChecks(self._answer, self._check, max_body=lambda path: 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with the headers of all answers."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._checked(scope, receive, send_on)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] not in _METHODS:
            raise ApiError(405, "the view shows runs, and changes nothing")
        if not self._shared and scope["path"] not in _OPEN:
            require_own_name(headers, self._host)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        given = request.query_params.get(KEY)
        if given is not None and is_key(given, self._key):
            await self._welcome(request)(scope, receive, send)
        elif is_key(request.cookies.get(self._cookie, ""), self._key):
            await self._app(scope, receive, send)
        else:
            closed = "This view opens with the link that `etude view` has printed. Copy the whole of it."
            await PlainTextResponse(f"{closed}\n", 401)(scope, receive, send)

    def _welcome(self, request: Request) -> Response:
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != KEY]
        path = request.url.path.lstrip("/")
        answer = RedirectResponse(f"/{path}" + (f"?{urlencode(rest)}" if rest else ""), 303)
        answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict", path="/")
        return answer


def new_key() -> str:
    """A key that nobody guesses."""
    return secrets.token_urlsafe(24)
