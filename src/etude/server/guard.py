"""The guard in front of all routes: who may come in, and with how much; it counts what is asked."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.server.extensions import ServerExtension
from etude.server.settings import ServerSettings
from etude.wire.http_server import ApiError, RequestChecks, is_key, require_own_name, shown_key

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


class Guard:
    """Checks key, name and size of each request, and counts it."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, extensions: Sequence[ServerExtension]
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._large = _LARGE.union(*(extension.large_paths for extension in extensions))
        self._checked = RequestChecks(app, self._check, max_body=self._max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._checked(scope, receive, send)
            return
        headers, started, status = Headers(scope=scope), time.perf_counter(), 500
        request_id = headers.get("x-request-id", "")[:128] or f"req_{secrets.token_hex(12)}"

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
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
        if scope["path"] in _OPEN:
            return
        if self._settings.api_key is None:
            require_own_name(headers, self._settings.host)
        elif not is_key(shown_key(headers), self._settings.api_key.get_secret_value()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counters of one server, and gauges that are read when they are asked for."""

    def __init__(self, job_counts: Callable[[], Mapping[str, int]], sequences: Callable[[], float]) -> None:
        """`job_counts` gives the number of jobs by status."""
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "etude_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "etude_request_seconds",
            "Time to answer a request.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._prompt = Counter("etude_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._sampled = Counter("etude_sampled_tokens", "Tokens sampled.", registry=self.registry)
        gauge = Gauge("etude_sequences", "Sequences under way and waiting.", registry=self.registry)
        gauge.set_function(sequences)

        class Jobs(Collector):
            def collect(self) -> list[GaugeMetricFamily]:
                family = GaugeMetricFamily("etude_jobs", "Training jobs.", labels=["status"])
                for status, count in job_counts().items():
                    family.add_metric([status], count)
                return [family]

        self.registry.register(Jobs())

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered; `route` is the path's pattern, so that names do not make series."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_tokens(self, prompt: int, sampled: int) -> None:
        """A completion was made."""
        self._prompt.inc(prompt)
        self._sampled.inc(sampled)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)
