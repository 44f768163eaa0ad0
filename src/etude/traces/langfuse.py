"""Langfuse's exports: observations and scores of its API, its traces and its blob storage.

Names are in camel case (`traceId`) or, in blob storage, in snake case (`trace_id`). A row is an observation,
a score, a trace with `observations` and `scores`, or a page of the API with its rows under `data`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from etude.core.message import Message
from etude.traces.record import (
    NO_MESSAGE,
    LeftOut,
    LoggedCall,
    Record,
    finish_reason_of,
    list_of,
    mapping_of,
    message_of,
    messages_of,
    parsed,
    sampling_of,
    score_of,
    text_in,
    times_of,
    tools_of,
    usage_of,
)

_TYPES = (
    *("SPAN", "GENERATION", "EVENT", "AGENT", "TOOL", "CHAIN"),
    *("RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"),
)
_NUMBERS = ("NUMERIC", "BOOLEAN")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def fits(row: Mapping[str, Any]) -> bool:
    """Whether a row is of this format."""
    names = {_snake(key) for key in row}
    is_page = isinstance(row.get("data"), list) and "meta" in row
    is_trace = isinstance(row.get("observations"), list)
    is_observation = "trace_id" in names and row.get("type") in _TYPES
    is_score = {"trace_id", "name", "value", "data_type"} <= names
    return is_page or is_trace or is_observation or is_score


def read(row: Mapping[str, Any], where: str) -> Iterator[Record]:
    """The calls and scores of a row. Raises RowError."""
    if isinstance(row.get("data"), list) and "meta" in row:
        for index, value in enumerate(row["data"]):
            place = f"{where}: data[{index}]"
            yield from read(mapping_of(value, place, "the row"), place)
    elif isinstance(row.get("observations"), list):
        yield from _trace(row, where)
    else:
        yield from _row({_snake(key): value for key, value in row.items()}, where)


def _snake(name: Any) -> str:
    return _CAPITAL.sub("_", str(name)).lower()


def _trace(row: Mapping[str, Any], where: str) -> Iterator[Record]:
    """A trace with all that belongs to it, which may lack its id and session."""
    about = mapping_of(row.get("trace", row), where, "trace")
    own = {"traceId": text_in(about, "id"), "sessionId": text_in(about, "sessionId", "session_id")}
    observations = list_of(row["observations"], where, "observations")
    for index, value in enumerate(observations):
        place = f"{where}: observations[{index}]"
        if not isinstance(value, Mapping):
            yield LeftOut(place, "trace whose observations are named and not there: export those too")
            continue
        yield from _row({_snake(key): inner for key, inner in {**own, **value}.items()}, place)
    for value in list_of(row.get("scores", about.get("scores")), where, "scores"):
        score = {**own, **mapping_of(value, where, "scores")}
        yield _score({_snake(key): inner for key, inner in score.items()}, where)


def _row(row: Mapping[str, Any], where: str) -> Iterator[Record]:
    kind = row.get("type")
    if "value" in row and "data_type" in row:
        yield _score(row, where)
    elif kind == "GENERATION":
        yield _call(row, where)
    else:
        yield LeftOut(where, f"observation of the type {kind}")


def _score(row: Mapping[str, Any], where: str) -> Record:
    kind = row.get("data_type")
    if kind not in (*_NUMBERS, None):
        return LeftOut(where, f"score '{row.get('name')}' of the type {kind}, which is no number")
    return score_of(
        where,
        row.get("name"),
        row.get("value"),
        row.get("comment"),
        call=text_in(row, "observation_id"),
        trace=text_in(row, "trace_id"),
    )


def _call(row: Mapping[str, Any], where: str) -> Record:
    asked = parsed(row.get("input"), where, "input")
    given = mapping_of(
        parsed(row.get("model_parameters") or None, where, "modelParameters"), where, "modelParameters"
    )
    if isinstance(asked, Mapping):
        # As clients are called: the messages among all other arguments.
        given, messages, tools = {**asked, **given}, asked.get("messages"), asked.get("tools")
        if messages is None:
            return LeftOut(where, "generation whose input has no messages")
    elif isinstance(asked, list):
        messages, tools = asked, None
    elif isinstance(asked, str) and asked:
        messages, tools = [{"role": "user", "content": asked}], None
    else:
        return LeftOut(where, "generation without an input")
    answer = _answer(row.get("output"), where)
    failed = row.get("level") == "ERROR" and answer is None
    if answer is None and not failed:
        return LeftOut(where, "generation without an output")
    began, seconds = times_of(row, "start_time", "end_time", where)
    usage = mapping_of(row.get("usage_details") or row.get("usage"), where, "usageDetails")
    sampled = {key: _number(value) for key, value in given.items()}
    return LoggedCall(
        where,
        messages_of(messages, where, "input.messages"),
        answer,
        tools_of(tools, where, "input.tools"),
        model=text_in(row, "provided_model_name", "model"),
        sampling=sampling_of(sampled, where, "modelParameters"),
        usage=usage_of(usage.get("input"), usage.get("output")),
        finish_reason=finish_reason_of(answer),
        error=(text_in(row, "status_message") or NO_MESSAGE) if failed else None,
        began=began,
        seconds=seconds,
        id=text_in(row, "id"),
        trace=text_in(row, "trace_id"),
        session=text_in(row, "session_id"),
    )


def _number(value: Any) -> Any:
    """A parameter, of which some clients keep the text; `"inf"` and the like stand for none."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.isdecimal() else None if "inf" in value.lower() else float(value)
    except ValueError:
        return None


def _answer(value: Any, where: str) -> Message | None:
    """The assistant's message of an output: a message, a completion with choices, or text."""
    answer = parsed(value, where, "output")
    if isinstance(answer, list):
        answer = answer[-1] if answer else None
    if isinstance(answer, Mapping) and isinstance(answer.get("choices"), list) and answer["choices"]:
        answer = mapping_of(answer["choices"][0], where, "output.choices[0]").get("message")
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer} if answer else None
    if not isinstance(answer, Mapping):
        return None
    if "content" not in answer and "tool_calls" not in answer:
        # A form that the client has read out of the answer.
        return {"role": "assistant", "content": json.dumps(dict(answer), ensure_ascii=False, default=str)}
    return message_of({"role": "assistant", **answer}, where, "output")
