"""OpenTelemetry: episodes, calls, tools, evaluators and jobs as spans of the GenAI semantic conventions.

Spans are read from the journal, with the times that things had, and sent to a collector by OTLP when their
epoch or validation is over. The ids of a span follow from what it is of, so that one that is sent twice is
the same one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.core.errors import EtudeError
from etude.store.run_folder import RunFolder
from etude.trackers.record import RunRecord, State, TrackedRun, require_package
from etude.trackers.spans import Spans

if TYPE_CHECKING:
    from etude.config.builder import Builder

_AT_ONCE = 512
"""Spans of one request."""


class OtelConfig(TrackerConfig, name="otel"):
    """Spans of episodes and all that happens in them, for any collector that takes OTLP over HTTP.

    Headers, seconds and the name of the service are those of OpenTelemetry's own variables:
    OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TIMEOUT and OTEL_SERVICE_NAME.
    """

    endpoint: str | None = None
    """The collector, as `http://localhost:4318`; left out: as OTEL_EXPORTER_OTLP_ENDPOINT says, or that."""
    content: bool = False
    """Whether messages, arguments and results are sent too; secrets are masked in them."""

    def destination(self) -> str:
        return self.endpoint or ""


class OtelTracker:
    """Sends the spans of episodes and jobs."""

    def __init__(self, config: OtelConfig) -> None:
        self._config = config
        self._run: TrackedRun | None = None
        self._exporter: Any = None

    def open(self, run: TrackedRun) -> str:
        """Make a client of the collector; nothing is sent by that."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        config, self._run = self._config, run
        endpoint = None if config.endpoint is None else f"{config.endpoint.rstrip('/')}/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint)
        return ""

    def send(self, record: RunRecord) -> None:
        """Send the spans of the record's episodes and of its job. Raises EtudeError."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        config, tracked = self._config, self._run
        assert tracked is not None
        with RunFolder.read(tracked.folder) as run:
            spans = Spans(run, tracked, content=config.content).of_record(record)
            while batch := [*islice(spans, _AT_ONCE)]:
                if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                    raise EtudeError(
                        "the collector has not taken spans; is it there, and does it take OTLP over HTTP?"
                    )

    def close(self, state: State) -> None:
        """Close the client."""
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None


@register_tracker(config_type=OtelConfig)
async def otel(config: OtelConfig, builder: Builder) -> AsyncIterator[OtelTracker]:
    """Raises MissingExtraError."""
    require_package("opentelemetry.exporter.otlp.proto.http", "otel")
    yield OtelTracker(config)
