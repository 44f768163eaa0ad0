"""The entries of a log, whatever its format: calls of a model, scores, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from etude.core.call import NO_USAGE, PLAIN_SAMPLING, Sampling, Usage
from etude.core.data_model import kind_of, number
from etude.core.episode import WORKFLOW
from etude.core.errors import DatasetError
from etude.core.evaluation import is_score
from etude.core.json_text import read_json
from etude.core.message import Message, Tool

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KEPT = ("name", "tool_call_id", "weight")
_SAMPLING = TypeAdapter(Sampling)
_SAMPLED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
NO_MESSAGE = "an error without a message"
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
"""From which size on a time is in nanoseconds, microseconds, milliseconds since 1970, and what divides it."""


class RowError(DatasetError):
    """A row of a log is not as its format has it."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One call of a model."""

    where: str
    """`file:line`."""
    messages: tuple[Message, ...]
    answer: Message | None
    """None where the call failed."""
    tools: tuple[Tool, ...] = ()
    model: str = ""
    sampling: Sampling = PLAIN_SAMPLING
    usage: Usage = NO_USAGE
    finish_reason: str = "stop"
    error: str | None = None
    began: float = 0.0
    """In Unix seconds; 0 where that is not known."""
    seconds: float = 0.0
    function: str = WORKFLOW
    id: str = ""
    """By which scores name it; no two calls of a log have one."""
    trace: str = ""
    """Calls of one trace are one chat."""
    session: str = ""
    """Only within a session does a trace go on with the chat of another."""
    is_whole: bool = False
    """Whether the chats of a log are written whole, so that none goes on with another."""
    expected: Any = None


@dataclass(frozen=True, slots=True)
class LoggedScore:
    """A number that somebody gave a call, or a whole trace."""

    where: str
    name: str
    value: float
    reason: str = ""
    call: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a log that makes no chat."""

    where: str
    reason: str


Record: TypeAlias = LoggedCall | LoggedScore | LeftOut


def parsed(value: Any, where: str, what: str) -> Any:
    """A value that may be written as JSON text."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        return read_json(value)
    except ValueError as error:
        raise RowError(where, f"{what} is broken JSON: {error}") from error


def mapping_of(value: Any, where: str, what: str) -> Mapping[str, Any]:
    """An object, which may be missing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(where, f"{what} must be an object, found {shown(value)}")
    return value


def list_of(value: Any, where: str, what: str) -> Sequence[Any]:
    """A list, which may be missing."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RowError(where, f"{what} must be a list, found {shown(value)}")
    return value


def text_in(row: Mapping[str, Any], *names: str) -> str:
    """The first of these fields that says something, as text."""
    values = (row.get(name) for name in names)
    return next((str(value) for value in values if isinstance(value, str | int) and value != ""), "")


def messages_of(value: Any, where: str, what: str) -> tuple[Message, ...]:
    """Messages in OpenAI's form. Raises RowError for one that is not."""
    rows = list_of(value, where, what)
    return tuple(message_of(row, where, f"{what}[{index}]") for index, row in enumerate(rows))


def message_of(value: Any, where: str, what: str) -> Message:
    """A message in OpenAI's form, without what no model reads. Raises RowError."""
    row = mapping_of(value, where, what)
    role, content = row.get("role"), row.get("content")
    if role not in ROLES:
        raise RowError(where, f"{what}.role must be one of {', '.join(ROLES)}, found {shown(role)}")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) for part in content):
            raise RowError(where, f"{what}.content must have objects for its parts")
        content = [dict(part) for part in content]
    elif content is not None and not isinstance(content, str):
        raise RowError(where, f"{what}.content must be text or a list of parts, found {shown(content)}")
    message: Message = {"role": role, "content": content}
    if content is None and isinstance(row.get("refusal"), str):
        message["content"] = row["refusal"]
    thinking = row.get("reasoning_content") or row.get("reasoning")
    if isinstance(thinking, str) and role == "assistant":
        message["reasoning_content"] = thinking
    calls = list_of(row.get("tool_calls"), where, f"{what}.tool_calls")
    if calls:
        message["tool_calls"] = [
            _tool_call(call, where, f"{what}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return message | {name: row[name] for name in _KEPT if row.get(name) is not None}


def _tool_call(value: Any, where: str, what: str) -> dict[str, Any]:
    call = mapping_of(value, where, what)
    function = mapping_of(call.get("function"), where, f"{what}.function")
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"), where, what)


def tool_call(id: Any, name: Any, arguments: Any, where: str, what: str) -> dict[str, Any]:
    """A call of a tool as OpenAI writes it. Raises RowError without a name."""
    if not isinstance(name, str) or not name:
        raise RowError(where, f"{what} must name its function, found {shown(name)}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(id or ""), "type": "function", "function": {"name": name, "arguments": text}}


def tools_of(value: Any, where: str, what: str) -> tuple[Tool, ...]:
    """Tools in OpenAI's form, with or without `function` around what they are. Raises RowError."""
    tools = []
    for index, row in enumerate(list_of(value, where, what)):
        tool = mapping_of(row, where, f"{what}[{index}]")
        named = mapping_of(tool.get("function", tool), where, f"{what}[{index}].function")
        if not isinstance(named.get("name"), str):
            raise RowError(where, f"{what}[{index}] must have a name, found {shown(named.get('name'))}")
        kept = {key: named[key] for key in ("name", "description", "parameters", "strict") if key in named}
        tools.append({"type": "function", "function": kept})
    return tuple(tools)


def sampling_of(row: Mapping[str, Any], where: str, what: str) -> Sampling:
    """How a call was sampled, as far as a request says. Raises RowError for an impossible value."""
    given = {ours: row[theirs] for theirs, ours in _SAMPLED.items() if row.get(theirs) is not None}
    try:
        return _SAMPLING.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise RowError(where, f"{what}.{at}: {first['msg']}, found {shown(given.get(at))}") from error


def usage_of(prompt: Any, completion: Any) -> Usage:
    """Counts of tokens; 0 for those that are not told."""
    counts = (
        count if type(count) in (int, float) and 0 <= count < 2**53 else 0 for count in (prompt, completion)
    )
    return Usage(*map(int, counts))


def score_of(
    where: str, name: Any, value: Any, reason: Any = "", *, call: str = "", trace: str = ""
) -> LoggedScore | LeftOut:
    """A score, or that it is none: names and yes or no count, words do not."""
    try:
        score = number(value)
    except ValueError:
        return LeftOut(where, f"feedback '{name}' that is no number")
    if not isinstance(name, str) or not name or "/" in name or not is_score(score):
        return LeftOut(where, "feedback without a name or a finite number")
    return LoggedScore(where, name, score, reason if isinstance(reason, str) else "", call, trace)


def time_of(value: Any, where: str, what: str) -> float:
    """A time in Unix seconds: of text in ISO 8601, a time, or a number whose size tells its unit; 0 for none.

    Raises RowError.
    """
    if value is None or value == "":
        return 0.0
    try:
        if isinstance(value, str) and not value.isdigit():
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        seconds = number(int(value) if isinstance(value, str) else value)
    except (ValueError, OverflowError, OSError) as error:
        raise RowError(where, f"{what} is no time: {shown(value)}") from error
    unit = next((unit for least, unit in _UNITS if seconds >= least), 1.0)
    return seconds / unit if 0 <= seconds < 1e20 else 0.0


def times_of(row: Mapping[str, Any], start: str, end: str, where: str) -> tuple[float, float]:
    """When a call began, in Unix seconds, and the seconds that it took; 0 where that is not known."""
    began, ended = (time_of(row.get(name), where, name) for name in (start, end))
    return began, max(0.0, ended - began) if began and ended else 0.0


def finish_reason_of(answer: Message | None) -> str:
    """Why an answer ended, of a log that does not say so."""
    return "tool_calls" if answer is not None and answer.get("tool_calls") else "stop"


def choices_of(call: LoggedCall, answers: Sequence[tuple[Message, str]]) -> Iterator[LoggedCall | LeftOut]:
    """The call with each of several answers; those after the first are chats of their own on its prompt."""
    for index, (message, reason) in enumerate(answers):
        answered = replace(call, answer=message, finish_reason=reason or "stop")
        if index:
            name, trace = f"{call.id}#{index}" if call.id else "", f"{call.trace or call.where}#{index}"
            answered = replace(answered, id=name, trace=trace)
        yield answered


def shown(value: Any) -> str:
    """A value in an error: short."""
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, list(value)[:6])) or 'nothing in it'}"
    return kind_of(value) if isinstance(value, list) or value is None else f"{value!r:.60}"
