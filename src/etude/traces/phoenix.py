"""Spans of the OpenInference conventions, as Phoenix exports them.

A row has `attributes` with the span's own (`llm.input_messages`, `llm.output_messages`, `llm.model_name` …),
in whatever way they are nested: flattened with dots and numbers, as columns of a data frame, or as objects.
Rows of annotations (`span_id`, `name`, `result`) come along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etude.core.message import Message
from etude.traces.record import (
    LeftOut,
    LoggedCall,
    Record,
    RowError,
    choices_of,
    list_of,
    mapping_of,
    message_of,
    parsed,
    sampling_of,
    score_of,
    text_in,
    time_of,
    tools_of,
    usage_of,
)

KIND = "openinference.span.kind"
_DEEPEST = 32
_FEEDBACK = (("annotations", "annotation"), ("evaluations", "evaluation"))


def fits(row: Mapping[str, Any]) -> bool:
    """Whether a row is of this format."""
    if "span_id" in row and ("annotation_name" in row or ("name" in row and _is_result(row))):
        return True
    is_span = "context.span_id" in row or "span_id" in mapping_or_nothing(row.get("context"))
    return is_span and ("attributes" in row or any(str(key).startswith("attributes.") for key in row))


def mapping_or_nothing(value: Any) -> Mapping[str, Any]:
    """The value where it is an object."""
    return value if isinstance(value, Mapping) else {}


def _is_result(row: Mapping[str, Any]) -> bool:
    return any(str(key).partition(".")[0] == "result" for key in row)


def read(row: Mapping[str, Any], where: str) -> Iterator[Record]:
    """The call of a span with its feedback, or an annotation. Raises RowError."""
    if "span_id" in row and "attributes" not in row:
        about = nested(row, where)
        result = mapping_of(about.get("result"), where, "result")
        name = text_in(about, "annotation_name", "name")
        score = result.get("score")
        if score is None:
            yield LeftOut(where, f"annotation '{name}' without a score")
            return
        yield score_of(where, name, score, result.get("explanation"), call=text_in(row, "span_id"))
        return
    span = nested(row, where)
    attributes = mapping_of(parsed(span.get("attributes"), where, "attributes"), where, "attributes")
    kind = text_in(span, "span_kind") or None
    yield from read_span({KIND: kind, **attributes}, span, where)


def read_span(attributes: Mapping[str, Any], about: Mapping[str, Any], where: str) -> Iterator[Record]:
    """The call and the feedback in the attributes of a span; `about` has the rest of it."""
    own = nested(attributes, where)
    place = mapping_of(about.get("context"), where, "context")
    call, trace = text_in(place, "span_id"), text_in(place, "trace_id")
    kind = text_in(
        mapping_of(mapping_of(own.get("openinference"), where, KIND).get("span"), where, KIND), "kind"
    )
    if kind.upper() == "LLM":
        yield from _calls(own, about, call, trace, where)
    else:
        yield LeftOut(where, f"span of the kind {kind.upper() or 'of none'}")
    for many, one in _FEEDBACK:
        for index, value in enumerate(list_of(own.get(many), where, many)):
            what = f"{many}.{index}"
            given = mapping_of(mapping_of(value, where, what).get(one), where, f"{what}.{one}")
            if given.get("score") is None:
                yield LeftOut(where, f"{one} '{given.get('name')}' without a score")
                continue
            score, reason = given["score"], given.get("explanation")
            yield score_of(where, given.get("name"), score, reason, call=call, trace=trace)


def _calls(
    own: Mapping[str, Any], about: Mapping[str, Any], call: str, trace: str, where: str
) -> Iterator[Record]:
    llm = mapping_of(own.get("llm"), where, "llm")
    asked, answered = (
        _messages(llm.get(name), where, f"llm.{name}") for name in ("input_messages", "output_messages")
    )
    failed = text_in(about, "status_code").upper().endswith("ERROR")
    if not asked or not (answered or failed):
        yield LeftOut(where, "span of a model without llm.input_messages or llm.output_messages")
        return
    began, ended = (time_of(about.get(name), where, name) for name in ("start_time", "end_time"))
    given = mapping_of(
        parsed(llm.get("invocation_parameters"), where, "llm.invocation_parameters"),
        where,
        "llm.invocation_parameters",
    )
    tokens = mapping_of(llm.get("token_count"), where, "llm.token_count")
    session = mapping_of(own.get("session"), where, "session")
    logged = LoggedCall(
        where,
        tuple(asked),
        None,
        tools_of(_tools(llm.get("tools"), where), where, "llm.tools"),
        model=text_in(llm, "model_name"),
        sampling=sampling_of(given, where, "llm.invocation_parameters"),
        usage=usage_of(tokens.get("prompt"), tokens.get("completion")),
        error=None if answered else text_in(about, "status_message") or "an error without a message",
        began=began,
        seconds=max(0.0, ended - began) if began and ended else 0.0,
        id=call,
        trace=trace,
        session=text_in(session, "id"),
    )
    if not answered:
        yield logged
        return
    reasons = ["tool_calls" if message.get("tool_calls") else "stop" for message in answered]
    yield from choices_of(logged, [*zip(answered, reasons, strict=True)])


def _messages(value: Any, where: str, what: str) -> list[Message]:
    made = []
    for index, item in enumerate(list_of(value, where, what)):
        row = mapping_of(mapping_of(item, where, f"{what}.{index}").get("message"), where, f"{what}.{index}")
        message = dict(row)
        if "contents" in row:
            message["content"] = [_part(part, where, f"{what}.{index}") for part in row["contents"] or ()]
        calls = list_of(row.get("tool_calls"), where, f"{what}.{index}.message.tool_calls")
        message["tool_calls"] = [mapping_of(call, where, what).get("tool_call") for call in calls]
        made.append(message_of(message, where, f"{what}.{index}.message"))
    return made


def _part(value: Any, where: str, what: str) -> dict[str, Any]:
    return dict(mapping_of(mapping_of(value, where, what).get("message_content"), where, what))


def _tools(value: Any, where: str) -> list[Any]:
    tools = []
    for item in list_of(value, where, "llm.tools"):
        tool = mapping_of(mapping_of(item, where, "llm.tools").get("tool"), where, "llm.tools.tool")
        tools.append(parsed(tool.get("json_schema"), where, "llm.tools.tool.json_schema"))
    return tools


def nested(value: Any, where: str) -> dict[str, Any]:
    """An object whose names with dots are objects in one another, and numbered ones lists; without nothings.

    `{"llm.input_messages.0.message.role": "user"}` becomes `{"llm": {"input_messages": [{"message": …}]}}`.
    """
    made = _nested(value, where, 0)
    return made if isinstance(made, dict) else {}


def _nested(value: Any, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise RowError(where, f"it is nested deeper than {_DEEPEST} levels")
    if isinstance(value, list):
        return [_nested(item, where, depth + 1) for item in value]
    if not isinstance(value, Mapping):
        return value
    tree: dict[str, Any] = {}
    for key, inner in value.items():
        if inner is None:
            continue
        *path, last = str(key).split(".", maxsplit=_DEEPEST)
        place = tree
        for name in path:
            following = place.setdefault(name, {})
            if not isinstance(following, dict):
                raise RowError(where, f"'{key}' is below '{name}', which has a value of its own")
            place = following
        if isinstance(place.get(last), dict) and isinstance(inner, Mapping):
            place[last] = {**place[last], **inner}
        else:
            place[last] = inner
    if tree and all(name.isdecimal() for name in tree):
        return [_nested(tree[name], where, depth + 1) for name in sorted(tree, key=int)]
    return {name: _nested(inner, where, depth + 1) for name, inner in tree.items()}
