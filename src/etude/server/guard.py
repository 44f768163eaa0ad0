"""The guard in front of all routes: who may come in, how often, with how much, and from which version."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import math
import secrets
import time
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.server.errors import ApiError
from etude.server.extensions import ServerExtension
from etude.server.metrics import Metrics
from etude.server.settings import ServerSettings

VERSION_HEADER = "x-etude-version"
"""Clients of etude send their version in it, and every answer has the server's."""

WARNING_HEADER = "x-etude-warning"

_MOST_CLIENTS = 10_000
_OPEN = frozenset({"/health", "/version", "/docs", "/openapi.json"})
"""Paths that need no key, because they give nothing away."""
_LARGE = frozenset({"/v1/files"})
"""Paths whose bodies are training data."""
_MULTIPART_BYTES = 64 * 1024
"""Bytes that an upload's form may take beside the file."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@cache
def server_version() -> str:
    """The version of etude that this server is."""
    return metadata.version("etude")


def compare_versions(client: str) -> tuple[str | None, str | None]:
    """Why a client of that version is refused, and the warning for one that is not; each may be None."""
    try:
        theirs, ours = Version(client), Version(server_version())
    except InvalidVersion:
        return f"the header {VERSION_HEADER} is {client!r:.40}, which is no version", None
    pair = f"this server is etude {ours}, and the client is etude {theirs}:"
    if theirs.major != ours.major:
        return f"{pair} another major version. Install etude {ours.major}.* in the client", None
    return None, None if theirs.minor == ours.minor else f"{pair} newer features may be missing"


class RateLimit:
    """A bucket for each client address, which holds a minute's requests and fills evenly (a token bucket)."""

    def __init__(self, per_minute: int) -> None:
        self._most = float(per_minute)
        self._per_second = per_minute / 60
        self._buckets: dict[str, tuple[float, float]] = {}
        """Requests that were left in each, and when; the client that was let in last is the last."""

    def wait(self, client: str, now: float) -> float:
        """Seconds until another request of a client is let in; 0 lets this one in. `now` is in seconds."""
        before, then = self._buckets.get(client, (self._most, now))
        left = min(self._most, before + (now - then) * self._per_second)
        if left < 1:
            return (1 - left) / self._per_second
        self._buckets.pop(client, None)
        self._buckets[client] = (left - 1, now)
        if len(self._buckets) > _MOST_CLIENTS:  # Memory has a bound; the oldest bucket is the fullest.
            del self._buckets[next(iter(self._buckets))]
        return 0.0


class Guard:
    """Checks key, host, version and size of each request, and counts it."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, extensions: Sequence[ServerExtension]
    ) -> None:
        self._app = app
        self._open = _OPEN.union(*(extension.open_paths for extension in extensions))
        self._large = _LARGE.union(*(extension.large_paths for extension in extensions))
        self._settings = settings
        self._metrics = metrics
        rate = settings.requests_per_minute
        self._rate = None if rate is None else RateLimit(rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, started, status = Headers(scope=scope), time.perf_counter(), 500
        client = headers.get(VERSION_HEADER)
        refusal, warning = compare_versions(client) if client is not None else (None, None)
        request_id = headers.get("x-request-id", "")[:128] or f"req_{secrets.token_hex(12)}"

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = request_id
                added[VERSION_HEADER] = server_version()
                if warning is not None:
                    added[WARNING_HEADER] = warning
            await send(message)

        try:
            app = self._app
            try:
                self._check(scope, headers, refusal)
            except ApiError as error:
                app = error.response()
            await app(scope, self._limited(scope, receive), send_on)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.count_request(scope["method"], route, status, time.perf_counter() - started)

    def _check(self, scope: Scope, headers: Headers, version: str | None) -> None:
        """Raise ApiError for a request that is not let in; `version` says what is wrong with its client's."""
        path = scope["path"]
        if path not in self._open:
            # Before the key is looked at, so that keys cannot be guessed quickly.
            self._check_rate(scope)
            if not self._has_key(headers):
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            if self._settings.api_key is None and not self._names_us(headers):
                # A web page could otherwise reach the server through a name that leads to this machine.
                raise ApiError(403, "this server answers to localhost only; start it with a key")
            if version is not None:
                raise ApiError(400, version, code="incompatible_version")
        length = headers.get("content-length", "0")
        self._check_size(path, int(length) if length.isdecimal() else 0)

    def _check_rate(self, scope: Scope) -> None:
        address, _ = scope.get("client") or ("", 0)
        if self._rate is not None and (wait := self._rate.wait(address, time.monotonic())):
            message = f"more than {self._settings.requests_per_minute} requests a minute came from {address}"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=math.ceil(wait))

    def _check_size(self, path: str, size: int) -> None:
        large = path.rstrip("/") in self._large
        limit = self._settings.max_file + _MULTIPART_BYTES if large else self._settings.max_body
        if size > limit:
            error = ApiError(413, f"the request is larger than {limit} bytes", code="request_too_large")
            error.headers = {"connection": "close"}  # The rest of the body is not read.
            raise error

    def _has_key(self, headers: Headers) -> bool:
        if self._settings.api_key is None:
            return True
        expected = self._settings.api_key.get_secret_value()
        return hmac.compare_digest(expected.encode(), _key_of(headers.get("authorization", "")).encode())

    def _names_us(self, headers: Headers) -> bool:
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:
            return False
        return name in _LOCAL_NAMES or name == self._settings.host

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Receives the body, and stops when it is too large or does not come."""
        seen, complete = 0, False

        async def receive_some() -> Message:
            nonlocal seen, complete
            try:
                async with asyncio.timeout(None if complete else self._settings.body_timeout):
                    message = await receive()
            except TimeoutError as error:
                raise ApiError(408, "the rest of the request did not come", code="timeout") from error
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                self._check_size(scope["path"], seen)
            return message

        return receive_some


def _key_of(header: str) -> str:
    """The bearer's key, or the password of an address `http://any:key@host`, which is all that some clients
    can send; empty when there is neither."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return ""
