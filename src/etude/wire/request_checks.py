"""The middleware of every HTTP server of Etude's: names, keys, the size of bodies, and failures as errors."""

from __future__ import annotations

import base64
import contextlib
import hmac
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.wire.api_error import ApiError

_LOG = logging.getLogger("etude.http")

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_FRAMES = 4

Check = Callable[[Scope, Headers], None]
"""Raises ApiError for a request that is not let in."""


class RequestChecks:
    """ASGI middleware that refuses requests, limits their bodies, and answers what fails.

    A failure of the application is an error object and one line in the log.
    """

    def __init__(
        self,
        app: ASGIApp,
        check: Check | None = None,
        *,
        max_body: Callable[[str], int] = lambda path: 32 * 2**20,
    ) -> None:
        """`max_body` gives the most bytes that the body of a request to a path may have."""
        self._app = app
        self._check = check
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def send_on(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            headers = Headers(scope=scope)
            if self._check is not None:
                self._check(scope, headers)
            length = headers.get("content-length", "0")
            limit = self._max_body(scope["path"])
            _check_size(int(length) if length.isdecimal() else 0, limit)
            await self._app(scope, _limited(receive, limit), send_on)
            return
        except ApiError as error:
            answer = error
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told that it was no answer
            _LOG.error("%s %s failed: %s", scope["method"], scope["path"], in_one_line(error))
            answer = ApiError(500, "the server failed at this request; its log has the reason")
        if not is_started:
            await answer.response(scope["path"])(scope, receive, send)


def _limited(receive: Receive, limit: int) -> Receive:
    """Receives a body, and stops when it is too large: its length need not be said before."""
    seen = 0

    async def receive_some() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        _check_size(seen, limit)
        return message

    return receive_some


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        # uvicorn takes the rest of the body and forgets it, so that the client can read the answer.
        raise ApiError(413, f"the request is larger than {limit} bytes", code="request_too_large")


def require_key(
    headers: Mapping[str, str], expected: str, wrong: str = "the API key is missing or wrong"
) -> None:
    """Raise ApiError 401 unless a request bears the key, which is compared in a time that tells nothing."""
    if not is_key(shown_key(headers), expected):
        raise ApiError(401, wrong, code="invalid_api_key")


def is_key(shown: str, expected: str) -> bool:
    """Whether that is the key, in a time that tells nothing."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), expected.encode())


def shown_key(headers: Mapping[str, str]) -> str:
    """The key that a request bears, empty without one.

    In `Authorization: Bearer`; in `x-api-key` where Anthropic's clients have it; or as the password of an
    address `http://any:key@host`, which is all that some clients can send.
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return headers.get("x-api-key", "")


def require_own_name(headers: Headers, host: str = "") -> None:
    """Raise ApiError 403 for what a web page may have sent to a server without a key.

    A page reaches it under a name of the page's own that leads to this machine, or says where it comes from.
    `host` is the address that the server listens at.
    """
    named = headers.get("host", "")
    try:
        name = urlsplit(f"//{named}").hostname
    except ValueError:
        name = None
    if name not in _LOCAL_NAMES and name != host:
        raise ApiError(403, "this server answers to localhost only; start it with a key", code="wrong_host")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != named:
        raise ApiError(
            403,
            f"this server has no key, and so answers no web page of another place, as {origin!r:.80} is; "
            "start it with a key",
            code="wrong_origin",
        )
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "this server has no key, and so answers no other web page", code="wrong_origin")


def in_one_line(error: BaseException) -> str:
    """An error with the innermost places that it came through."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    places = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(frames))
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text} ({places})"
