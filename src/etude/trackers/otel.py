"""OpenTelemetry: episodes, calls, tools, scores and jobs as spans of the GenAI semantic conventions.

When an epoch or a validation is over, the spans of its episodes are read from the journal, with the times
that they had, and sent to a collector by OTLP. The ids of a span follow from what it is of, so that one that
is sent twice is the same one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr

from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.errors import EtudeError
from etude.core.job import TrainingJobStatus
from etude.core.secrets import masked, masked_data
from etude.core.tools import ToolUse
from etude.store.episodes import EVALUATION, iter_episodes
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.trackers.extras import require_package
from etude.trackers.record import RunRecord, State, TrackedRun, code_version
from etude.trackers.spoken import messages_as_parts

if TYPE_CHECKING:
    from etude.config.builder import Builder

_AT_ONCE = 512
"""Spans of one request."""
_PHASES = {"epoch": "train/{}", "validation": "validation/{}", "evaluation": EVALUATION}


class OtelConfig(TrackerConfig, name="otel"):
    """Spans of episodes and all that happens in them, for any collector that takes OTLP over HTTP."""

    endpoint: str | None = None
    """The collector, as `http://localhost:4318`; left out: as OTEL_EXPORTER_OTLP_ENDPOINT says, or that."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Headers of the requests, such as an API key."""
    content: bool = False
    """Whether messages, arguments and results are sent too; secrets are masked in them."""
    service: str = "etude"
    """The `service.name` of the spans."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds of one request, with its repetitions."""

    def destination(self) -> str:
        return self.endpoint or ""


class OtelTracker:
    """Sends the spans of each record."""

    def __init__(self, config: OtelConfig) -> None:
        self._config = config
        self._run: TrackedRun | None = None
        self._exporter: Any = None

    def open(self, run: TrackedRun) -> str:
        """Make a client of the collector; nothing is sent by that."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        config, self._run = self._config, run
        endpoint = None if config.endpoint is None else f"{config.endpoint.rstrip('/')}/v1/traces"
        headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        self._exporter = OTLPSpanExporter(endpoint, headers=headers or None, timeout=config.timeout)
        return ""

    def has(self, record: RunRecord) -> bool | None:
        """A collector cannot be asked."""
        return None

    def send(self, record: RunRecord) -> None:
        """Send the spans of the record's episodes and of its job. Raises EtudeError."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        assert self._run is not None
        spans: list[Any] = []
        with RunFolder.read(self._run.folder) as run:
            for span in _Spans(run, self._run, self._config).of(record):
                spans.append(span)
                if len(spans) == _AT_ONCE:
                    self._export(spans, SpanExportResult.SUCCESS)
                    spans = []
        if spans:
            self._export(spans, SpanExportResult.SUCCESS)

    def close(self, state: State) -> None:
        """Close the client."""
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None

    def _export(self, spans: Sequence[Any], success: Any) -> None:
        if self._exporter.export(spans) is not success:
            raise EtudeError(
                "the collector has not taken spans; is it there, and does it take OTLP over HTTP?"
            )


class _Spans:
    """Makes spans of what a run folder has."""

    def __init__(self, run: RunFolder, tracked: TrackedRun, config: OtelConfig) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._run, self._token, self._content = run, tracked.token, config.content
        about = {f"etude.{name}": text for name, text in code_version(tracked.environment).items()}
        self._resource = Resource({"service.name": config.service, "etude.run": run.name, **about})
        self._scope = InstrumentationScope("etude")
        workflow = tracked.config.get("workflow") or {}
        self._agent = str(
            workflow.get("function") or workflow.get("name") or workflow.get("_type") or "agent"
        )
        self._models = tracked.config.get("llms") or {}

    def of(self, record: RunRecord) -> Iterator[Any]:
        """The spans of a record: of its episodes, and of its job."""
        if record.kind == "epoch":
            history = histories(self._run.journal, self._run.name)[record.target]
            entry = next((each for each in history.epochs if each.epoch == record.step), None)
            if entry is not None and entry.status is not None:
                yield self._job(entry.status, record, float(entry.metrics.get("training_seconds") or 0.0))
        phase = _PHASES.get(record.kind)
        if phase is not None:
            for episode in iter_episodes(self._run.journal, phase=phase.format(record.step)):
                yield from self._episode(episode)

    def _job(self, status: TrainingJobStatus, record: RunRecord, seconds: float) -> Any:
        figures = (status.metadata or {}).get("metrics") or {}
        numbers = {
            f"etude.job.{name}": value for name, value in figures.items() if isinstance(value, int | float)
        }
        about = {"etude.epoch": record.step, "etude.job.backend": status.backend, **numbers}
        return self._span(
            f"train {status.run_id}", status.run_id, None, (record.at - seconds, record.at), about
        )

    def _episode(self, episode: EpisodeRecord) -> Iterator[Any]:
        from opentelemetry.sdk.trace import Event
        from opentelemetry.trace import SpanKind

        times = self._run.journal.times(f"{episode.id}/score/")
        ended = self._run.journal.times(episode.id)[episode.id]
        uses = [event.tool for event in episode.events if event.tool is not None]
        began = [at for at in (*(call.began for call in episode.calls), *(use.began for use in uses)) if at]
        answers = [call.completion.usage for call in episode.calls if call.completion is not None]
        about: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": self._agent,
            "gen_ai.conversation.id": episode.id,
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in answers),
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in answers),
            "etude.example": episode.example.id,
            "etude.generation": episode.generation,
        }
        failure = episode.failure
        if failure is not None:
            about["error.type"] = failure.kind
        scores = [
            Event("gen_ai.evaluation.result", self._score(key, episode.id), round(at * 1e9))
            for key, at in times.items()
        ]
        parent = self._span(
            f"invoke_agent {self._agent}",
            episode.id,
            None,
            (min([ended - episode.seconds, *began]), ended),
            about,
            error=None if failure is None else failure.reason,
            events=scores,
        )
        yield parent
        for call in episode.calls:
            if call.began:
                yield self._span(
                    f"chat {self._model(call)}",
                    f"{episode.id}/call/{call.index}",
                    parent,
                    (call.began, call.began + call.seconds),
                    self._of_call(call),
                    error=call.error,
                    kind=SpanKind.CLIENT,
                )
        for number, use in enumerate(uses):
            if use.began:
                failed = use.outcome if use.outcome != "ok" else None
                place, name = f"{episode.id}/tool/{number}", f"execute_tool {use.name}"
                span = (use.began, use.began + use.seconds)
                yield self._span(name, place, parent, span, self._of_tool(use), error=failed)

    def _score(self, key: str, episode_id: str) -> dict[str, Any]:
        row = self._run.journal.get(key) or {}
        about = {"gen_ai.evaluation.name": key.removeprefix(f"{episode_id}/score/")}
        if row.get("score") is not None:
            about["gen_ai.evaluation.score.value"] = row["score"]
        if row.get("error") is not None:
            about["error.type"] = str(row["error"])
        if self._content and row.get("reasoning"):
            about["gen_ai.evaluation.explanation"] = masked(str(row["reasoning"]))
        return about

    def _model(self, call: Call) -> str:
        entry = self._models.get(call.model) or {}
        return str(entry.get("model") or entry.get("model_name") or call.model)

    def _of_call(self, call: Call) -> dict[str, Any]:
        sampling, answer = call.request.sampling, call.completion
        about: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": str((self._models.get(call.model) or {}).get("_type") or "etude"),
            "gen_ai.request.model": self._model(call),
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "etude.model": call.model,
            "etude.function": call.function,
            "etude.retries": call.retries,
        }
        if sampling.max_tokens is not None:
            about["gen_ai.request.max_tokens"] = sampling.max_tokens
        if answer is not None:
            about["gen_ai.response.finish_reasons"] = [answer.finish_reason]
            about["gen_ai.usage.input_tokens"] = answer.usage.prompt_tokens
            about["gen_ai.usage.output_tokens"] = answer.usage.completion_tokens
            if not call.logged:
                about["etude.model_version"] = answer.model_version
        else:
            about["error.type"] = "call_failed"
        if self._content:
            about["gen_ai.input.messages"] = _json(messages_as_parts(call.request.messages))
            if answer is not None:
                (said,) = messages_as_parts([answer.message])
                about["gen_ai.output.messages"] = _json([{**said, "finish_reason": answer.finish_reason}])
        return about

    def _of_tool(self, use: ToolUse) -> dict[str, Any]:
        about = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": use.name,
            "gen_ai.tool.type": "function",
        }
        if use.outcome != "ok":
            about["error.type"] = use.outcome
        if self._content:
            about["gen_ai.tool.call.arguments"] = _json(use.arguments)
            about["gen_ai.tool.call.result"] = masked(use.result)
        return about

    def _span(
        self,
        name: str,
        place: str,
        parent: Any,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
        *,
        error: str | None = None,
        events: Sequence[Any] = (),
        kind: Any = None,
    ) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        above = None if parent is None else parent.get_span_context()
        trace = self._number(place, 16) if above is None else above.trace_id
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return ReadableSpan(
            name,
            context=SpanContext(trace, self._number(f"span {place}", 8), False, sampled),
            parent=above,
            resource=self._resource,
            attributes=dict(attributes),
            events=events,
            kind=kind or SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, masked(error)),
            start_time=round(times[0] * 1e9),
            end_time=round(times[1] * 1e9),
            instrumentation_scope=self._scope,
        )

    def _number(self, place: str, size: int) -> int:
        """The id of a span or a trace: the same for the same thing of the same run."""
        digest = hashlib.blake2b(f"{self._token}/{place}".encode(), digest_size=size).digest()
        return int.from_bytes(digest) or 1


def _json(value: Any) -> str:
    return json.dumps(masked_data(value), ensure_ascii=False, default=str)


@register_tracker(config_type=OtelConfig)
async def otel(config: OtelConfig, builder: Builder) -> AsyncIterator[OtelTracker]:
    """Raises MissingExtraError."""
    require_package("opentelemetry.exporter.otlp.proto.http", "otel")
    yield OtelTracker(config)
