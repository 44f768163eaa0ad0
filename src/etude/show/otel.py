"""The OpenTelemetry tracker: episodes as OTLP spans, sent when their epoch or validation is over."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.core.errors import EtudeError, require_extra
from etude.show.tracker import RunRecord, State, TrackedRun
from etude.store.episodes import EVALUATION, iter_episodes
from etude.store.journal import Journal
from etude.store.log import histories
from etude.store.run_folder import RunFolder

_AT_ONCE = 512
"""Spans in one request."""
_PARTS = {
    "warm_up": "warm-up",
    "epoch": "train/{epoch}",
    "validation": "validation/{epoch}",
    "evaluation": EVALUATION,
}
"""The beginning of the ids of a record's episodes, by the kind of the record."""


class OtelConfig(TrackerConfig, name="otel"):
    """Spans of episodes and everything in them, for any collector that takes OTLP over HTTP.

    Headers, timeout and service name come from OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_TIMEOUT and OTEL_SERVICE_NAME.
    """

    endpoint: str | None = None
    """The collector. By default OTEL_EXPORTER_OTLP_ENDPOINT, or else `http://localhost:4318`."""
    content: bool = False
    """Set it to true to send messages, arguments and results too. Secrets in them are masked."""

    def destination(self) -> str:
        return self.endpoint or ""


class OtelTracker:
    """A tracker that sends the spans of episodes."""

    _run: TrackedRun
    _exporter: Any = None

    def __init__(self, config: OtelConfig) -> None:
        self._config = config

    def open(self, run: TrackedRun) -> str:
        """Make a client of the collector. Nothing is sent yet."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        from etude.show.spans import EpisodeSpans

        endpoint = self._config.endpoint
        self._run = run
        self._exporter = OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
        code = {f"etude.{name}": text for name, text in run.code.items()}
        service = os.environ.get("OTEL_SERVICE_NAME", "etude")
        resource = Resource.create({"service.name": service, "etude.run": run.name, **code})
        self._spans = EpisodeSpans(run.token, run.config.get("llms") or {}, resource, self._config.content)
        return ""

    def send(self, record: RunRecord) -> None:
        """Send the spans of the record's episodes. Raises EtudeError."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        with RunFolder.read(self._run.folder) as run:
            spans = self._record_spans(run.journal, record)
            while batch := [*islice(spans, _AT_ONCE)]:
                if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                    raise EtudeError(
                        "the collector did not take the spans; does it run, and does it take OTLP over HTTP?"
                    )

    def close(self, state: State) -> None:
        """Close the client."""
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None

    def _record_spans(self, journal: Journal, record: RunRecord) -> Iterator[Any]:
        # Several models may train on the same episodes, which are sent once.
        first = next(iter(histories(journal, "")))
        part = _PARTS.get(record.kind, "").format(epoch=record.step)
        if part and (record.kind == "warm_up" or record.target in (None, first)):
            for episode in iter_episodes(journal, part):
                if re.match(rf"{part}(?!\d)", episode.id):
                    yield from self._spans.of(journal, episode)


@register_tracker(config_type=OtelConfig)
async def otel(config: OtelConfig, builder: Builder) -> AsyncIterator[OtelTracker]:
    """Build the tracker. Raises MissingExtraError."""
    require_extra("opentelemetry.exporter.otlp.proto.http", "the tracker 'otel'", "otel")
    yield OtelTracker(config)
