"""Metrics for Prometheus, at `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
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

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered; `route` is the path's pattern, so that names do not make series."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_tokens(self, prompt: int, sampled: int) -> None:
        """A completion was made."""
        self._prompt.inc(prompt)
        self._sampled.inc(sampled)

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def watch_counts(self, name: str, help: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        """A gauge with a value for each label, read when it is asked for."""

        class Counts(Collector):
            def collect(self) -> list[GaugeMetricFamily]:
                family = GaugeMetricFamily(name, help, labels=[label])
                for key, value in read().items():
                    family.add_metric([key], value)
                return [family]

        self.registry.register(Counts())

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)
