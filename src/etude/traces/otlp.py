"""Spans and events of OpenTelemetry's GenAI conventions, in the JSON that collectors' file exporter writes.

A line is `{"resourceSpans": [...]}` or `{"resourceLogs": [...]}`. Messages are in the attributes
`gen_ai.input.messages` and `gen_ai.output.messages`, of a span or of the event
`gen_ai.client.inference.operation.details`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from etude.core.call import Sampling
from etude.core.episode import WORKFLOW
from etude.core.message import Message
from etude.traces.record import (
    NO_MESSAGE,
    ROLES,
    LeftOut,
    LoggedCall,
    Record,
    RowError,
    choices_of,
    list_of,
    mapping_of,
    parsed,
    sampling_of,
    score_of,
    shown,
    text_in,
    times_of,
    tool_call,
    tools_of,
    usage_of,
)

_DETAILS = "gen_ai.client.inference.operation.details"
_RESULT = "gen_ai.evaluation.result"
_INPUT, _OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
_CHATS = ("chat", "generate_content", "text_completion")
_REASONS = {"tool_call": "tool_calls"}
_FAILED = (2, "STATUS_CODE_ERROR")


def fits(row: Mapping[str, Any]) -> bool:
    """Whether a row is of this format."""
    return "resourceSpans" in row or "resourceLogs" in row


def read(row: Mapping[str, Any], where: str) -> Iterator[Record]:
    """The calls and scores of a line. Raises RowError."""
    for span in _items(row, where, "resourceSpans", "scopeSpans", "spans"):
        yield from _of_span(span, where)
    for log in _items(row, where, "resourceLogs", "scopeLogs", "logRecords"):
        attributes = _attributes(log, where)
        name = text_in(log, "eventName") or text_in(attributes, "event.name")
        yield from _of_event(name, attributes, log, where)


def _items(row: Mapping[str, Any], where: str, *path: str) -> Iterator[Mapping[str, Any]]:
    """The objects at the end of a path of lists."""
    name, *rest = path
    for value in list_of(row.get(name), where, name):
        item = mapping_of(value, where, name)
        if rest:
            yield from _items(item, where, *rest)
        else:
            yield item


def _of_span(span: Mapping[str, Any], where: str) -> Iterator[Record]:
    attributes = _attributes(span, where)
    operation = text_in(attributes, "gen_ai.operation.name")
    if _OUTPUT in attributes or (_INPUT in attributes and _error_of(span, attributes)):
        yield from _calls(attributes, span, where)
    elif operation in _CHATS or _INPUT in attributes:
        yield LeftOut(where, "span of a chat without its messages: not captured, or in events")
    else:
        yield LeftOut(where, f"span that is no chat: {operation or 'of no GenAI operation'}")
    for event in _items(span, where, "events"):
        name = text_in(event, "name")
        if name in (_DETAILS, _RESULT):
            yield from _of_event(name, _attributes(event, where), span, where)


def _of_event(
    name: str, attributes: Mapping[str, Any], place: Mapping[str, Any], where: str
) -> Iterator[Record]:
    """The calls or the score of an event, which happened in a span or names it."""
    if name == _DETAILS:
        yield from _calls(attributes, place, where)
    elif name == _RESULT:
        yield score_of(
            where,
            attributes.get("gen_ai.evaluation.name"),
            attributes.get("gen_ai.evaluation.score.value"),
            attributes.get("gen_ai.evaluation.explanation"),
            call=text_in(place, "spanId"),
            trace=text_in(place, "traceId"),
        )
    elif name.startswith("gen_ai."):
        yield LeftOut(
            where,
            f"event {name} of the conventions before 1.37: set OTEL_SEMCONV_STABILITY_OPT_IN="
            "gen_ai_latest_experimental where the chats are logged",
        )
    else:
        yield LeftOut(where, "event of something else")


def _error_of(span: Mapping[str, Any], attributes: Mapping[str, Any]) -> str | None:
    """Why a call failed; None where it did not."""
    status = span.get("status") if isinstance(span.get("status"), Mapping) else {}
    assert isinstance(status, Mapping)
    kind = text_in(attributes, "error.type")
    if status.get("code") in _FAILED or kind:
        return text_in(status, "message") or kind or NO_MESSAGE
    return None


def _calls(attributes: Mapping[str, Any], place: Mapping[str, Any], where: str) -> Iterator[Record]:
    answers = _messages(attributes, _OUTPUT, where)
    error = None if answers else _error_of(place, attributes)
    if not answers and error is None:
        yield LeftOut(where, f"chat without {_OUTPUT}")
        return
    start = "startTimeUnixNano" if "startTimeUnixNano" in place else "timeUnixNano"
    began, seconds = times_of(place, start, "endTimeUnixNano", where)
    request = {key.removeprefix("gen_ai.request."): value for key, value in attributes.items()}
    call = LoggedCall(
        where,
        (
            *_instructions(attributes, where),
            *(message for message, _ in _messages(attributes, _INPUT, where)),
        ),
        None,
        tools_of(_list(attributes, "gen_ai.tool.definitions", where), where, "gen_ai.tool.definitions"),
        model=text_in(attributes, "gen_ai.response.model", "gen_ai.request.model"),
        sampling=sampling_of(request, where, "gen_ai.request") if request else Sampling(),
        usage=usage_of(
            attributes.get("gen_ai.usage.input_tokens"), attributes.get("gen_ai.usage.output_tokens")
        ),
        error=error,
        began=began,
        seconds=seconds,
        function=text_in(attributes, "etude.function") or WORKFLOW,
        id=text_in(place, "spanId"),
        trace=text_in(place, "traceId"),
        session=text_in(attributes, "gen_ai.conversation.id"),
    )
    if error is not None:
        yield call
        return
    # Since v0.1.0 the conventions have the reasons beside the messages, and not in them.
    others = chain(_list(attributes, "gen_ai.response.finish_reasons", where), repeat(""))
    reasons = [own or str(other) for (_, own), other in zip(answers, others, strict=False)]
    yield from choices_of(
        call,
        [(message, _REASONS.get(each, each)) for (message, _), each in zip(answers, reasons, strict=True)],
    )


def _messages(attributes: Mapping[str, Any], name: str, where: str) -> list[tuple[Message, str]]:
    """The messages of an attribute in OpenAI's form, each with its finish reason."""
    made: list[tuple[Message, str]] = []
    for index, value in enumerate(_list(attributes, name, where)):
        row = mapping_of(value, where, f"{name}[{index}]")
        role = row.get("role")
        if role not in ROLES:
            raise RowError(
                where, f"{name}[{index}].role must be one of {', '.join(ROLES)}, found {shown(role)}"
            )
        parts = list_of(row.get("parts"), where, f"{name}[{index}].parts")
        for message in _message_of_parts(str(role), parts, where, f"{name}[{index}]"):
            made.append((message, text_in(row, "finish_reason")))
    return made


def _instructions(attributes: Mapping[str, Any], where: str) -> list[Message]:
    """The system message that was given apart from the chat."""
    name = "gen_ai.system_instructions"
    parts = _list(attributes, name, where)
    return _message_of_parts("system", parts, where, name) if parts else []


def _list(attributes: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    return list_of(parsed(attributes.get(name), where, name), where, name)


def _message_of_parts(role: str, parts: Sequence[Any], where: str, what: str) -> list[Message]:
    """A message of several parts; each result of a tool is a message of its own."""
    contents: list[dict[str, Any]] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for value in parts:
        part = mapping_of(value, where, f"{what}.parts")
        kind, content = part.get("type"), part.get("content")
        if kind == "text":
            contents.append({"type": "text", "text": "" if content is None else str(content)})
        elif kind == "reasoning":
            thinking.append(str(content or ""))
        elif kind == "tool_call":
            calls.append(tool_call(part.get("id"), part.get("name"), part.get("arguments"), where, what))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            results.append({"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": text})
        else:
            contents.append(dict(part))
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


def _attributes(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`[{"key": …, "value": {"stringValue": …}}, …]` as an object."""
    pairs = (
        mapping_of(value, where, "attributes")
        for value in list_of(item.get("attributes"), where, "attributes")
    )
    return {str(pair.get("key")): _value(pair.get("value"), where) for pair in pairs}


def _value(value: Any, where: str) -> Any:
    """A value of OTLP's JSON. Raises RowError for one of no known kind."""
    given = mapping_of(value, where, "an attribute's value")
    if not given:
        return None
    kind, inner = next(iter(given.items()))
    if kind == "arrayValue":
        values = mapping_of(inner, where, kind).get("values")
        return [_value(each, where) for each in list_of(values, where, kind)]
    if kind == "kvlistValue":
        pairs = list_of(mapping_of(inner, where, kind).get("values"), where, kind)
        return _attributes({"attributes": list(pairs)}, where)
    if kind == "intValue":
        # 64-bit integers are text in the JSON of protobuf.
        try:
            return int(inner)
        except (TypeError, ValueError) as error:
            raise RowError(where, f"intValue must be a whole number, found {shown(inner)}") from error
    if kind in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        return inner
    raise RowError(
        where, f"an attribute's value must be one of OTLP's kinds, such as stringValue, found {kind}"
    )
