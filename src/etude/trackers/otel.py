"""The component of the OpenTelemetry tracker. Its code is loaded when a run has such a tracker."""

from __future__ import annotations

from collections.abc import AsyncIterator

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.trackers.record import Tracker, require_package


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


@register_tracker(config_type=OtelConfig)
async def otel(config: OtelConfig, builder: Builder) -> AsyncIterator[Tracker]:
    """Build the tracker. Raises MissingExtraError."""
    require_package("opentelemetry.exporter.otlp.proto.http", "otel")
    from etude.trackers.spans import OtelTracker

    yield OtelTracker(config.endpoint, config.content)
