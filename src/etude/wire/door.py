"""The door of an HTTP server: requests come in that keep to the limits, and failures go out as errors."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.wire.api_error import ApiError
from etude.wire.http_limits import SLOWEST_BYTES, HttpLimits

_LOG = logging.getLogger("etude.http")

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_FRAMES = 4

Admit = Callable[[Scope, Headers], None]
"""Raises ApiError for a request that is not let in."""


class Door:
    """ASGI middleware that limits the bodies of requests, and answers what it refuses and what fails.

    A failure of the application is an error object and one line in the log.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits, admit: Admit | None = None) -> None:
        self._app = app
        self._limits = limits
        self._admit = admit

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
            self._check(scope)
            await self._app(scope, self._limited(scope, receive), send_on)
            return
        except ApiError as error:
            answer = error
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told that it was no answer
            _LOG.error("%s %s failed: %s", scope["method"], scope["path"], in_one_line(error))
            answer = ApiError(500, "the server failed at this request; its log has the reason")
        if not is_started:
            await answer.response(scope["path"])(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._admit is not None:
            self._admit(scope, headers)
        length = headers.get("content-length", "0")
        self._check_size(scope["path"], int(length) if length.isdecimal() else 0)

    def _check_size(self, path: str, size: int) -> None:
        limit = self._limits.max_body_of(path)
        if size > limit:
            # The rest of the body is not read.
            raise ApiError(
                413, f"the request is larger than {limit} bytes", code="request_too_large", closes=True
            )

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Receives the body, and stops when it is too large or does not come."""
        seen, is_complete, begin = 0, False, time.monotonic()

        async def receive_some() -> Message:
            nonlocal seen, is_complete
            left = begin + self._limits.seconds + seen / SLOWEST_BYTES - time.monotonic()
            try:
                async with asyncio.timeout(None if is_complete else left):
                    message = await receive()
            except TimeoutError as error:
                late = (
                    f"the body of the request did not come in time: {self._limits.seconds:g} seconds, and "
                    f"one more for each {SLOWEST_BYTES} bytes"
                )
                raise ApiError(408, late, code="timeout", closes=True) from error
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                self._check_size(scope["path"], seen)
            return message

        return receive_some


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
