"""The tracker for OpenTelemetry: episodes as spans, in its conventions for generative AI, v0.1.0.

Spans have the times of the recorded events. A span's ids follow from its subject, so a span that is sent
twice is the same one. Attributes that the conventions lack are named `etude.…`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.config.component import TrackerConfig
from etude.config.document import value_at
from etude.core.call import Call
from etude.core.episode import EpisodeRecord, ToolUse
from etude.core.errors import EtudeError
from etude.core.secrets import mask_secrets, masked_data
from etude.show.tracker import RunRecord, State, TrackedRun, register_package_tracker
from etude.store.episodes import EVALUATION, episode_scores, iter_episodes, phase_stage, score_key
from etude.store.histories import read_histories
from etude.store.journal import Journal
from etude.store.run_folder import RunFolder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan

_EPISODES = {
    "warm_up": "warm-up",
    "epoch": "train/{epoch}",
    "validation": "validation/{epoch}",
    "evaluation": EVALUATION,
}
"""The beginning of the ids of a record's episodes, by the kind of the record."""
_SPANS_AT_ONCE = 512
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed")
"""Fields of a request that are sent if they are set."""

_Told: TypeAlias = tuple[str, dict[str, Any], tuple[str, str] | None]
"""The name of a span, its attributes, and the kind and text of its error."""


class OtelConfig(TrackerConfig, name="otel"):
    """Spans of episodes and everything in them, for any collector that takes OTLP over HTTP.

    The collector, headers, timeout and service name come from OpenTelemetry's own variables:
    OTEL_EXPORTER_OTLP_ENDPOINT (by default `http://localhost:4318`), OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_TIMEOUT and OTEL_SERVICE_NAME.
    """

    content: bool = False
    """Set it to true to send messages, arguments and results too. Secrets in them are masked."""


class OtelTracker:
    """The tracker for OpenTelemetry. It sends spans of episodes when their epoch or validation is over."""

    def __init__(self, config: OtelConfig) -> None:
        self._content = config.content

    def open(self, run: TrackedRun) -> str:
        """Make a client of the collector. Nothing is sent yet."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._run, self._exporter = run, OTLPSpanExporter()
        code = {f"etude.{name}": text for name, text in run.code.items()}
        service = os.environ.get("OTEL_SERVICE_NAME", "etude")
        self._resource = Resource.create({"service.name": service, "etude.run": run.name, **code})
        return ""

    def send(self, record: RunRecord) -> None:
        """Send the spans of the record's episodes. Raises EtudeError."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        with RunFolder.read(self._run.folder) as run:
            # Several models may train on the same episodes, which are sent once.
            first = next(iter(read_histories(run.journal)))
            part = _EPISODES.get(record.kind, "").format(epoch=record.step)
            if not part or (record.kind != "warm_up" and record.target not in (None, first)):
                return
            found = iter_episodes(run.journal, part)  # With `train/3`, also those of `train/30`.
            episodes = (each for each in found if phase_stage(each.id) == phase_stage(part))
            spans = chain.from_iterable(self._episode_spans(run.journal, each) for each in episodes)
            while batch := [*islice(spans, _SPANS_AT_ONCE)]:
                if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                    raise EtudeError(
                        "the collector rejected the spans; is it running, and does it accept OTLP over HTTP?"
                    )

    def close(self, state: State) -> None:
        """Close the client."""
        self._exporter.shutdown()

    def _episode_spans(self, journal: Journal, episode: EpisodeRecord) -> Iterator[ReadableSpan]:
        """Yield the spans of a finished episode: its own span first, then its calls and tools."""
        ended = journal.times(episode.id)[episode.id]
        # An episode that is played again has other spans.
        place = f"{episode.id} of {ended}"
        uses = [event.tool for event in episode.events if event.tool is not None]
        happened: tuple[Call | ToolUse, ...] = (*episode.calls, *uses)
        timed = [each for each in happened if each.began]
        began = min([ended - episode.seconds, *(each.began for each in timed)])
        about: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": episode.id,
            "gen_ai.usage.input_tokens": episode.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": episode.usage.completion_tokens,
            "etude.example": episode.example.id,
            "etude.generation": episode.generation,
        }
        failure, scores = episode.failure, [*self._scores(journal, episode.id)]
        told: _Told = "invoke_agent", about, None if failure is None else (failure.kind, failure.reason)
        parent = self._span(told, place, None, began, ended, scores)
        yield parent
        for number, each in enumerate(timed):
            if isinstance(each, Call):
                told = self._describe_call(each)
            else:
                about = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": each.name}
                if self._content:
                    about["gen_ai.tool.call.arguments"] = _json(each.arguments)
                    about["gen_ai.tool.call.result"] = mask_secrets(each.result)
                error = None if each.outcome == "ok" else (each.outcome, each.outcome)
                told = f"execute_tool {each.name}", about, error
            yield self._span(told, f"{place}/{number}", parent, each.began, each.began + each.seconds)

    def _scores(self, journal: Journal, episode: str) -> Iterator[Event]:
        """Yield the scores of an episode as events of its span."""
        from opentelemetry.sdk.trace import Event

        times = journal.times(score_key(episode, ""))
        for name, row in episode_scores(journal, episode).items():
            facts = {"gen_ai.evaluation.name": name}
            if row.get("score") is not None:
                facts["gen_ai.evaluation.score.value"] = row["score"]
            if row.get("error") is not None:
                facts["error.type"] = "evaluator_failed"
            if self._content and row.get("reasoning"):
                facts["gen_ai.evaluation.explanation"] = mask_secrets(str(row["reasoning"]))
            yield Event("gen_ai.evaluation.result", facts, round(times[score_key(episode, name)] * 1e9))

    def _describe_call(self, call: Call) -> _Told:
        entry, completion = value_at(self._run.config, ("llms", call.model)) or {}, call.completion
        model = str(entry.get("model") or entry.get("model_name") or call.model)
        asked = {f"gen_ai.request.{name}": getattr(call.request.sampling, name) for name in _SAMPLING}
        about: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": str(entry.get("_type") or "etude"),
            "gen_ai.request.model": model,
            **{name: value for name, value in asked.items() if value is not None},
            "etude.model": call.model,
            "etude.function": call.function,
            "etude.retries": call.retries,
        }
        if self._content:
            about["gen_ai.input.messages"] = _parts(call.request.messages)
        if completion is None:
            return f"chat {model}", about, ("call_failed", call.error or "")
        about |= {
            "gen_ai.response.finish_reasons": [completion.finish_reason],
            "gen_ai.usage.input_tokens": completion.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": completion.usage.completion_tokens,
        }
        if not call.logged:
            about["etude.model_version"] = completion.model_version
        if self._content:
            about["gen_ai.output.messages"] = _parts([completion.message])
        return f"chat {model}", about, None

    def _span(
        self, told: _Told, place: str, parent: Any, began: float, ended: float, events: Sequence[Event] = ()
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        name, attributes, error = told
        above = None if parent is None else parent.get_span_context()
        trace = self._number(place, 16) if above is None else above.trace_id
        status = Status(StatusCode.UNSET)
        if error is not None:
            attributes["error.type"] = error[0]
            status = Status(StatusCode.ERROR, mask_secrets(error[1]))
        return ReadableSpan(
            name,
            context=SpanContext(
                trace, self._number(f"span {place}", 8), False, TraceFlags(TraceFlags.SAMPLED)
            ),
            parent=above,
            resource=self._resource,
            attributes=attributes,
            events=events,
            kind=SpanKind.CLIENT if name.startswith("chat ") else SpanKind.INTERNAL,
            status=status,
            start_time=round(began * 1e9),
            end_time=round(ended * 1e9),
        )

    def _number(self, place: str, size: int) -> int:
        """Return the id of a span or a trace, which is always the same for the same subject of a run."""
        digest = hashlib.blake2b(f"{self._run.token}/{place}".encode(), digest_size=size).digest()
        return int.from_bytes(digest) or 1


def _parts(messages: Sequence[Mapping[str, Any]]) -> str:
    """Convert OpenAI's messages to the form of the conventions: a role, and parts."""
    rows = []
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "content": content}] if isinstance(content, str) else [*(content or ())]
        parts += [{"type": "tool_call", **call} for call in message.get("tool_calls") or ()]
        rows.append({"role": message.get("role"), "parts": parts})
    return _json(rows)


def _json(value: Any) -> str:
    return json.dumps(masked_data(value), ensure_ascii=False, default=str)


register_package_tracker(OtelConfig, OtelTracker, "opentelemetry.exporter.otlp.proto.http")
