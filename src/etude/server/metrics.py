"""Metrics for Prometheus, at `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

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
