"""Spans of what a run folder has: the names, attributes and ids that they get.

The names are those of the GenAI semantic conventions v0.1.0, which are in development yet
(https://github.com/open-telemetry/semantic-conventions-genai). What they have no name for is `etude.…`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.job import TrainingJobStatus
from etude.core.json_text import read_json
from etude.core.secrets import masked, masked_data
from etude.core.tools import ToolUse
from etude.store.episodes import EVALUATION, iter_episodes
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.trackers.record import RunRecord, TrackedRun

_SAMPLING = ("temperature", "top_p", "max_tokens", "seed")
"""Fields of a request that are sent where they are set."""
_PARTS = {
    "warm_up": "warm-up",
    "epoch": "train/{epoch}",
    "validation": "validation/{epoch}",
    "evaluation": EVALUATION,
}
"""How the ids begin of the episodes that a record of a kind is about."""


class Spans:
    """Makes spans of what a run folder has."""

    def __init__(self, run: RunFolder, tracked: TrackedRun, *, content: bool) -> None:
        """`content` says whether messages, arguments and results are in them; secrets are masked there."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._run, self._token, self._content = run, tracked.token, content
        about = {f"etude.{name}": text for name, text in tracked.code.items()}
        service = os.environ.get("OTEL_SERVICE_NAME", "etude")
        self._resource = Resource.create({"service.name": service, "etude.run": run.name, **about})
        self._scope = InstrumentationScope("etude", about.get("etude.etude"))
        workflow = tracked.config.get("workflow") or {}
        self._agent = str(
            workflow.get("function") or workflow.get("name") or workflow.get("_type") or "agent"
        )
        self._models = tracked.config.get("llms") or {}

    def of_record(self, record: RunRecord) -> Iterator[Any]:
        """The spans of the episodes that a record is about, and of the job of an epoch."""
        by_target = histories(self._run.journal, self._run.name)
        # Several models train on the same episodes.
        is_first = record.kind == "warm_up" or record.target in (None, next(iter(by_target)))
        if record.kind in _PARTS and is_first:
            part = _PARTS[record.kind].format(epoch=record.step)
            for episode in iter_episodes(self._run.journal, part):
                if re.match(rf"{part}(?!\d)", episode.id):
                    yield from self._of_episode(episode)
        entries = by_target[record.target].epochs if record.kind == "epoch" else ()
        for entry in entries:
            if entry.epoch == record.step and entry.status is not None:
                yield self._job(entry.status, record, float(entry.metrics.get("training_seconds") or 0.0))

    def _of_episode(self, episode: EpisodeRecord) -> Iterator[Any]:
        """The spans of a finished episode: its own, which comes first, and those of all within it."""
        from opentelemetry.trace import SpanKind

        ended = self._run.journal.times(episode.id)[episode.id]
        # An episode that is played again is another one.
        place = f"{episode.id} of {ended}"
        scores = self._scores(episode)
        parent = self._invocation(episode, place, ended, scores)
        yield parent
        for call in episode.calls:
            if call.began:
                name, times = f"chat {self._model(call)}", (call.began, call.began + call.seconds)
                about = self._of_call(call)
                at = f"{place}/call/{call.index}"
                yield self._span(name, at, parent, times, about, error=call.error, kind=SpanKind.CLIENT)
        uses = [event.tool for event in episode.events if event.tool is not None]
        for number, use in enumerate(uses):
            if use.began:
                name, times = f"execute_tool {use.name}", (use.began, use.began + use.seconds)
                error = use.outcome if use.outcome != "ok" else None
                yield self._span(
                    name, f"{place}/tool/{number}", parent, times, _of_tool(use, self._content), error=error
                )
        for evaluator, (row, _) in scores.items():
            if row.get("began"):
                name, times = f"evaluation {evaluator}", (row["began"], row["began"] + row["seconds"])
                about = {"gen_ai.operation.name": "evaluation", **_of_score(evaluator, row, self._content)}
                yield self._span(
                    name, f"{place}/score/{evaluator}", parent, times, about, error=row.get("error")
                )

    def _scores(self, episode: EpisodeRecord) -> dict[str, tuple[Mapping[str, Any], float]]:
        """By evaluator: the stored score, and when it was stored."""
        journal, prefix = self._run.journal, f"{episode.id}/score/"
        times = journal.times(prefix)
        return {key.removeprefix(prefix): (value, times[key]) for key, value in journal.scan(prefix)}

    def _invocation(
        self,
        episode: EpisodeRecord,
        place: str,
        ended: float,
        scores: Mapping[str, tuple[Mapping[str, Any], float]],
    ) -> Any:
        from opentelemetry.sdk.trace import Event

        uses = [event.tool for event in episode.events if event.tool is not None]
        began = [at for at in (*(call.began for call in episode.calls), *(use.began for use in uses)) if at]
        usages = [call.completion.usage for call in episode.calls if call.completion is not None]
        about: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": self._agent,
            "gen_ai.conversation.id": episode.id,
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            "etude.example": episode.example.id,
            "etude.generation": episode.generation,
        }
        failure = episode.failure
        if failure is not None:
            about["error.type"] = failure.kind
        results = [
            Event("gen_ai.evaluation.result", _of_score(evaluator, row, self._content), round(at * 1e9))
            for evaluator, (row, at) in scores.items()
        ]
        times = (min([ended - episode.seconds, *began]), ended)
        error = None if failure is None else failure.reason
        return self._span(
            f"invoke_agent {self._agent}", place, None, times, about, error=error, events=results
        )

    def _job(self, status: TrainingJobStatus, record: RunRecord, seconds: float) -> Any:
        figures = (status.metadata or {}).get("metrics") or {}
        numbers = {
            f"etude.job.{name}": value for name, value in figures.items() if isinstance(value, int | float)
        }
        about = {"etude.epoch": record.step, "etude.job.backend": status.backend, **numbers}
        times = (record.at - seconds, record.at)
        return self._span(f"train {status.run_id}", status.run_id, None, times, about)

    def _model(self, call: Call) -> str:
        entry = self._models.get(call.model) or {}
        return str(entry.get("model") or entry.get("model_name") or call.model)

    def _of_call(self, call: Call) -> dict[str, Any]:
        sampling, completion = call.request.sampling, call.completion
        asked = {name: getattr(sampling, name) for name in _SAMPLING}
        about: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": str((self._models.get(call.model) or {}).get("_type") or "etude"),
            "gen_ai.request.model": self._model(call),
            **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
            "etude.model": call.model,
            "etude.function": call.function,
            "etude.retries": call.retries,
        }
        if completion is None:
            about["error.type"] = "call_failed"
        else:
            about["gen_ai.response.finish_reasons"] = [completion.finish_reason]
            about["gen_ai.usage.input_tokens"] = completion.usage.prompt_tokens
            about["gen_ai.usage.output_tokens"] = completion.usage.completion_tokens
            if not call.logged:
                about["etude.model_version"] = completion.model_version
        if self._content:
            about["gen_ai.input.messages"] = _json(_messages_as_parts(call.request.messages))
            if completion is not None:
                about["gen_ai.output.messages"] = _json(_messages_as_parts([completion.message]))
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


def _messages_as_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages in the form of the conventions: a role, and parts of several types."""
    return [{"role": message.get("role"), "parts": list(_parts(message))} for message in messages]


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if message.get("role") == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return
    if message.get("reasoning_content"):
        yield {"type": "reasoning", "content": message["reasoning_content"]}
    for part in [content] if isinstance(content, str) else content or ():
        if isinstance(part, str):
            yield {"type": "text", "content": part}
        elif part.get("type") == "text":
            yield {"type": "text", "content": part.get("text")}
        else:
            yield dict(part)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        with suppress(ValueError):
            arguments = read_json(arguments, unique_keys=False) if isinstance(arguments, str) else arguments
        named = {"id": call.get("id"), "name": function.get("name")}
        yield {"type": "tool_call", **named, "arguments": arguments}


def _of_tool(use: ToolUse, content: bool) -> dict[str, Any]:
    about = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": use.name,
        "gen_ai.tool.type": "function",
    }
    if use.outcome != "ok":
        about["error.type"] = use.outcome
    if content:
        about["gen_ai.tool.call.arguments"] = _json(use.arguments)
        about["gen_ai.tool.call.result"] = masked(use.result)
    return about


def _of_score(evaluator: str, row: Mapping[str, Any], content: bool) -> dict[str, Any]:
    about: dict[str, Any] = {"gen_ai.evaluation.name": evaluator}
    if row.get("score") is not None:
        about["gen_ai.evaluation.score.value"] = row["score"]
    if row.get("error") is not None:
        about["error.type"] = "evaluator_failed"
    if content and row.get("reasoning"):
        about["gen_ai.evaluation.explanation"] = masked(str(row["reasoning"]))
    return about


def _json(value: Any) -> str:
    return json.dumps(masked_data(value), ensure_ascii=False, default=str)
