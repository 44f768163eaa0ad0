"""Langfuse's exports: observations, scores and traces from its API or blob storage.

Names are in camel case (`traceId`) or, in blob storage, in snake case (`trace_id`). A row is an observation,
a score, a trace with `observations` and `scores`, or a page of the API with its rows under `data`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from etude.core.message import Message
from etude.wire import trace_record
from etude.wire.trace_record import LoggedCall, Record, RowValue, SkippedEntry

_TYPES = (
    *("SPAN", "GENERATION", "EVENT", "AGENT", "TOOL", "CHAIN"),
    *("RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"),
)
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def fits(row: Mapping[str, Any]) -> bool:
    """Return whether a row has this format."""
    names = {_to_snake_case(key) for key in row}
    is_page = isinstance(row.get("data"), list) and "meta" in row
    is_trace = isinstance(row.get("observations"), list)
    is_observation = "trace_id" in names and row.get("type") in _TYPES
    is_score = {"trace_id", "name", "value", "data_type"} <= names
    return is_page or is_trace or is_observation or is_score


def read(row: RowValue) -> Iterator[Record]:
    """Yield the calls and scores of a row. Raises RowError."""
    if isinstance(row["data"].value, list) and "meta" in row.object:
        for each in row["data"].items:
            yield from read(RowValue(each.value, f"{each.where}: {each.name}"))
    elif isinstance(row["observations"].value, list):
        yield from _trace(row)
    else:
        yield from _row(_with_snake_keys(row.object, row.where))


def _to_snake_case(name: Any) -> str:
    return _CAPITAL.sub("_", str(name)).lower()


def _with_snake_keys(row: Mapping[str, Any], where: str) -> RowValue:
    return RowValue({_to_snake_case(key): value for key, value in row.items()}, where)


def _trace(row: RowValue) -> Iterator[Record]:
    """Yield the entries of a trace, which may lack their trace id and session."""
    about = row["trace"] if "trace" in row.object else row
    own = {"traceId": about.text("id"), "sessionId": about.text("sessionId", "session_id")}
    for each in row["observations"].items:
        place = f"{each.where}: {each.name}"
        if isinstance(each.value, Mapping):
            yield from _row(_with_snake_keys({**own, **each.value}, place))
        else:
            yield SkippedEntry(place, "trace without the observations that it names: export those too")
    for score in row["scores"].items or about["scores"].items:
        yield _score(_with_snake_keys({**own, **score.object}, score.where))


def _row(row: RowValue) -> Iterator[Record]:
    kind = row["type"].value
    if "value" in row.object and "data_type" in row.object:
        yield _score(row)
    elif kind == "GENERATION":
        yield _call(row)
    else:
        yield SkippedEntry(row.where, f"observation of the type {kind}")


def _score(row: RowValue) -> Record:
    kind, name = row["data_type"].value, row["name"].value
    if kind not in ("NUMERIC", "BOOLEAN", None):
        return SkippedEntry(row.where, f"score '{name}' of the type {kind}, which is not a number")
    own = {"call": row.text("observation_id"), "trace": row.text("trace_id")}
    return trace_record.make_score(row.where, name, row["value"].value, row["comment"].value, **own)


def _call(row: RowValue) -> Record:
    asked, given = row["input"].parsed, row["model_parameters"]
    given = RowValue(given.value or None, row.where, "modelParameters").parsed
    if isinstance(asked.value, Mapping):
        # As clients are called: the messages among all other arguments.
        given, messages, tools = (
            replace(given, value={**asked.value, **given.object}),
            asked["messages"],
            asked["tools"],
        )
        if messages.value is None:
            return SkippedEntry(row.where, "generation whose input has no messages")
    elif isinstance(asked.value, list) or (isinstance(asked.value, str) and asked.value):
        chat = asked.value if isinstance(asked.value, list) else [{"role": "user", "content": asked.value}]
        messages, tools = RowValue(chat, row.where, "input.messages"), RowValue(None, row.where)
    else:
        return SkippedEntry(row.where, "generation without an input")
    answer = _answer(row["output"].parsed)
    failed = row["level"].value == "ERROR" and answer is None
    if answer is None and not failed:
        return SkippedEntry(row.where, "generation without an output")
    began, seconds = trace_record.parse_times(row["start_time"], row["end_time"])
    usage = RowValue(row["usage_details"].value or row["usage"].value, row.where, "usageDetails").object
    sampled = {key: _number(value) for key, value in given.object.items()}
    return LoggedCall(
        row.where,
        trace_record.read_messages(messages),
        answer,
        trace_record.read_tools(tools),
        model=row.text("provided_model_name", "model"),
        sampling=trace_record.read_sampling(replace(given, value=sampled)),
        usage=trace_record.read_usage(usage.get("input"), usage.get("output")),
        finish_reason=trace_record.guess_finish_reason(answer),
        error=(row.text("status_message") or trace_record.NO_MESSAGE) if failed else None,
        began=began,
        seconds=seconds,
        id=row.text("id"),
        trace=row.text("trace_id"),
        session=row.text("session_id"),
    )


def _number(value: Any) -> Any:
    """Return a parameter as a number. Some clients write it as text, where `"inf"` means none."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.isdecimal() else None if "inf" in value.lower() else float(value)
    except ValueError:
        return None


def _answer(output: RowValue) -> Message | None:
    """Return the assistant's message from an output: a message, a completion with choices, or text."""
    if isinstance(output.value, list):
        output = output.items[-1] if output.value else replace(output, value=None)
    if isinstance(output.value, Mapping) and isinstance(output.value.get("choices"), list):
        choices = output["choices"].items
        output = choices[0]["message"] if choices else output
    if isinstance(output.value, str):
        return {"role": "assistant", "content": output.value} if output.value else None
    if not isinstance(output.value, Mapping):
        return None
    if "content" not in output.value and "tool_calls" not in output.value:
        # An object that the client has parsed from the answer.
        text = json.dumps(dict(output.value), ensure_ascii=False, default=str)
        return {"role": "assistant", "content": text}
    return trace_record.read_message(output, "assistant")
