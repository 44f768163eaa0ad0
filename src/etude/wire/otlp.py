"""Spans and events of OpenTelemetry's GenAI conventions, in the JSON of the collector's file exporter.

A line is `{"resourceSpans": [...]}` or `{"resourceLogs": [...]}`. Messages are in the attributes
`gen_ai.input.messages` and `gen_ai.output.messages`, of a span or of the event
`gen_ai.client.inference.operation.details`.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import Any

from etude.core.call import Sampling
from etude.core.episode import WORKFLOW
from etude.core.message import Message
from etude.wire import trace_record
from etude.wire.trace_record import LoggedCall, Record, RowError, RowValue, SkippedEntry

_DETAILS = "gen_ai.client.inference.operation.details"
_RESULT = "gen_ai.evaluation.result"
_INPUT, _OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
_CHATS = ("chat", "generate_content", "text_completion")
_REASONS = {"tool_call": "tool_calls"}


def fits(row: Mapping[str, Any]) -> bool:
    """Return whether a row has this format."""
    return "resourceSpans" in row or "resourceLogs" in row


def read(row: RowValue) -> Iterator[Record]:
    """Yield the calls and scores of a line. Raises RowError."""
    for span in _items(row, "resourceSpans", "scopeSpans", "spans"):
        yield from _read_span(span)
    for log in _items(row, "resourceLogs", "scopeLogs", "logRecords"):
        attributes = _attributes(log)
        yield from _read_event(log.text("eventName") or attributes.text("event.name"), attributes, log)


def _items(row: RowValue, *path: str) -> Iterator[RowValue]:
    """Yield the objects at the end of a path of lists."""
    name, *rest = path
    for item in row[name].items:
        yield from _items(item, *rest) if rest else (item,)


def _read_span(span: RowValue) -> Iterator[Record]:
    attributes = _attributes(span)
    operation, known = attributes.text("gen_ai.operation.name"), attributes.object
    if _OUTPUT in known or (_INPUT in known and _find_error(span, attributes)):
        yield from _calls(attributes, span)
    elif operation in _CHATS or _INPUT in known:
        yield SkippedEntry(span.where, "chat span without messages: they were not captured, or are in events")
    else:
        yield SkippedEntry(span.where, f"span that is not a chat: {operation or 'no GenAI operation'}")
    for event in span["events"].items:
        name = event.text("name")
        if name in (_DETAILS, _RESULT):
            yield from _read_event(name, _attributes(event), span)


def _read_event(name: str, attributes: RowValue, place: RowValue) -> Iterator[Record]:
    """Yield the calls or the score of an event. `place` is its span, or a record that names the span."""
    if name == _DETAILS:
        yield from _calls(attributes, place)
    elif name == _RESULT:
        yield trace_record.make_score(
            place.where,
            attributes["gen_ai.evaluation.name"].value,
            attributes["gen_ai.evaluation.score.value"].value,
            attributes["gen_ai.evaluation.explanation"].value,
            call=place.text("spanId"),
            trace=place.text("traceId"),
        )
    elif name.startswith("gen_ai."):
        yield SkippedEntry(
            place.where,
            f"event {name} of the conventions before 1.37: set OTEL_SEMCONV_STABILITY_OPT_IN="
            "gen_ai_latest_experimental where the chats are logged",
        )
    else:
        yield SkippedEntry(place.where, "event that is not a chat")


def _find_error(span: RowValue, attributes: RowValue) -> str | None:
    """Return why a call failed, or None."""
    status = span["status"] if isinstance(span["status"].value, Mapping) else RowValue(None, span.where)
    kind = attributes.text("error.type")
    if status["code"].value in (2, "STATUS_CODE_ERROR") or kind:
        return status.text("message") or kind or trace_record.NO_MESSAGE
    return None


def _calls(attributes: RowValue, place: RowValue) -> Iterator[Record]:
    answers = _messages(attributes[_OUTPUT])
    error = None if answers else _find_error(place, attributes)
    if not answers and error is None:
        yield SkippedEntry(place.where, f"chat without {_OUTPUT}")
        return
    start = "startTimeUnixNano" if "startTimeUnixNano" in place.object else "timeUnixNano"
    began, seconds = trace_record.parse_times(place[start], place["endTimeUnixNano"])
    request = {key.removeprefix("gen_ai.request."): value for key, value in attributes.object.items()}
    system, usage = attributes["gen_ai.system_instructions"].parsed, "gen_ai.usage.{}_tokens".format
    call = LoggedCall(
        place.where,
        (
            *(_message_of_parts("system", system) if system.items else ()),
            *(message for message, _ in _messages(attributes[_INPUT])),
        ),
        None,
        trace_record.read_tools(attributes["gen_ai.tool.definitions"].parsed),
        model=attributes.text("gen_ai.response.model", "gen_ai.request.model"),
        sampling=trace_record.read_sampling(RowValue(request, place.where, "gen_ai.request"))
        if request
        else Sampling(),
        usage=trace_record.read_usage(attributes[usage("input")].value, attributes[usage("output")].value),
        error=error,
        began=began,
        seconds=seconds,
        function=attributes.text("etude.function") or WORKFLOW,
        id=place.text("spanId"),
        trace=place.text("traceId"),
        session=attributes.text("gen_ai.conversation.id"),
    )
    if error is not None:
        yield call
        return
    # Since v0.1.0 the conventions have the reasons next to the messages, not in them.
    beside = attributes["gen_ai.response.finish_reasons"].parsed.items
    others = chain((str(each.value) for each in beside), repeat(""))
    reasons = [own or other for (_, own), other in zip(answers, others, strict=False)]
    yield from trace_record.answered_calls(
        call,
        [(message, _REASONS.get(each, each)) for (message, _), each in zip(answers, reasons, strict=True)],
    )


def _messages(attribute: RowValue) -> list[tuple[Message, str]]:
    """Return an attribute's messages in OpenAI's form, each with its finish reason."""
    made: list[tuple[Message, str]] = []
    for row in attribute.parsed.items:
        role = row["role"].value
        if role not in trace_record.ROLES:
            raise row["role"].wrong(f"must be one of {', '.join(trace_record.ROLES)}")
        for message in _message_of_parts(role, row["parts"]):
            made.append((message, row.text("finish_reason")))
    return made


def _message_of_parts(role: str, parts: RowValue) -> list[Message]:
    """Return one message from several parts, and a separate message for each tool result."""
    contents: list[dict[str, Any]] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for part in parts.items:
        given = part.object
        kind, content = given.get("type"), given.get("content")
        if kind == "text":
            contents.append({"type": "text", "text": "" if content is None else str(content)})
        elif kind == "reasoning":
            thinking.append(str(content or ""))
        elif kind == "tool_call":
            call = trace_record.tool_call(part, given.get("id"), given.get("name"), given.get("arguments"))
            calls.append(call)
        elif kind == "tool_call_response":
            result = given.get("response", given.get("result"))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            results.append({"role": "tool", "tool_call_id": str(given.get("id") or ""), "content": text})
        else:
            contents.append(dict(given))
    if results and not contents and not calls:
        return results
    is_text = all(part.get("type") == "text" for part in contents)
    said_text: Any = "".join(str(part.get("text", "")) for part in contents) if contents else None
    message: Message = {"role": role, "content": said_text if is_text else contents}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _attributes(item: RowValue, name: str = "attributes") -> RowValue:
    """Return `[{"key": …, "value": {"stringValue": …}}, …]` as an object."""
    pairs = item[name].items
    return RowValue({str(pair["key"].value): _value(pair["value"]) for pair in pairs}, item.where)


def _value(given: RowValue) -> Any:
    """Return a value from OTLP's JSON. Raises RowError for an unknown kind."""
    if not given.object:
        return None
    kind, inner = next(iter(given.object.items()))
    if kind == "arrayValue":
        return [_value(each) for each in given[kind]["values"].items]
    if kind == "kvlistValue":
        return _attributes(given[kind], "values").value
    if kind == "intValue":
        # 64-bit integers are text in the JSON of protobuf.
        try:
            return int(inner)
        except (TypeError, ValueError, OverflowError) as error:
            raise given[kind].wrong("must be a whole number") from error
    if kind in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        return inner
    raise RowError(
        given.where, f"an attribute's value must be one of OTLP's kinds, such as stringValue, found {kind}"
    )
