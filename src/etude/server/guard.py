"""The guard in front of all routes: who may come in, how often, with how much, and from which version."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from functools import cache
from importlib import metadata

from packaging.version import InvalidVersion, Version
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.server.extensions import ServerExtension
from etude.server.metrics import Metrics
from etude.server.settings import ServerSettings
from etude.wire.http_server import ApiError, RequestChecks, require_key, require_own_name

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
    """Checks key, name, version and size of each request, and counts it."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, extensions: Sequence[ServerExtension]
    ) -> None:
        self._open = _OPEN.union(*(extension.open_paths for extension in extensions))
        self._settings = settings
        self._metrics = metrics
        rate = settings.requests_per_minute
        self._rate = None if rate is None else RateLimit(rate)
        self._large = _LARGE.union(*(extension.large_paths for extension in extensions))
        self._checked = RequestChecks(app, self._check, max_body=self._max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._checked(scope, receive, send)
            return
        headers, started, status = Headers(scope=scope), time.perf_counter(), 500
        _, warning = _compared(headers)
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
            await self._checked(scope, receive, send_on)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.count_request(scope["method"], route, status, time.perf_counter() - started)

    def _max_body(self, path: str) -> int:
        is_large = path.rstrip("/") in self._large
        return self._settings.max_file + _MULTIPART_BYTES if is_large else self._settings.max_body

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for a request that is not let in."""
        if scope["path"] in self._open:
            return
        # Before the key is looked at, so that keys cannot be guessed quickly.
        address, _ = scope.get("client") or ("", 0)
        self._check_rate(address)
        if self._settings.api_key is None:
            require_own_name(headers, self._settings.host)
        else:
            require_key(headers, self._settings.api_key.get_secret_value())
        refusal, _ = _compared(headers)
        if refusal is not None:
            raise ApiError(400, refusal, code="incompatible_version")

    def _check_rate(self, address: str) -> None:
        if self._rate is not None and (wait := self._rate.wait(address, time.monotonic())):
            message = f"more than {self._settings.requests_per_minute} requests a minute came from {address}"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=math.ceil(wait))


def _compared(headers: Headers) -> tuple[str | None, str | None]:
    """`compare_versions` of a request's client."""
    client = headers.get(VERSION_HEADER)
    return compare_versions(client) if client is not None else (None, None)
