"""The entries of a log in any format: model calls, scores, and left-out parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from etude.core.call import NO_USAGE, PLAIN_SAMPLING, Sampling, Usage
from etude.core.data_model import name_type, number
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
"""The smallest times in nano-, micro- and milliseconds since 1970, with their divisors to seconds."""


class RowError(DatasetError):
    """A row of a log breaks its format."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One model call."""

    where: str
    """`file:line`."""
    messages: tuple[Message, ...]
    answer: Message | None
    """None if the call failed."""
    tools: tuple[Tool, ...] = ()
    model: str = ""
    sampling: Sampling = PLAIN_SAMPLING
    usage: Usage = NO_USAGE
    finish_reason: str = "stop"
    error: str | None = None
    began: float = 0.0
    """In Unix seconds; 0 if unknown."""
    seconds: float = 0.0
    function: str = WORKFLOW
    id: str = ""
    """The id that scores refer to, unique in a log."""
    trace: str = ""
    """Calls of one trace form one chat."""
    session: str = ""
    """A call only continues a chat of the same session."""
    is_whole: bool = False
    """Whether the log has each chat whole, so that the call continues no other chat."""
    expected: Any = None


@dataclass(frozen=True, slots=True)
class LoggedScore:
    """A number that somebody gave to a call or a whole trace."""

    where: str
    name: str
    value: float
    reason: str = ""
    call: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class SkippedEntry:
    """A part of a log that forms no chat."""

    where: str
    reason: str


Record: TypeAlias = LoggedCall | LoggedScore | SkippedEntry


@dataclass(frozen=True, slots=True)
class RowValue:
    """A value in a row of a log, and its place."""

    value: Any
    where: str
    """`file:line`."""
    name: str = ""
    """Its place in the row: `messages[0].role`."""

    def __getitem__(self, name: str) -> RowValue:
        """Return a field of an object, which may be missing. Raises RowError."""
        return RowValue(self.object.get(name), self.where, f"{self.name}.{name}" if self.name else name)

    @property
    def object(self) -> Mapping[str, Any]:
        """The value as an object, empty if missing. Raises RowError."""
        if self.value is None:
            return {}
        if not isinstance(self.value, Mapping):
            raise self.wrong("must be an object")
        return self.value

    @property
    def items(self) -> list[RowValue]:
        """The value as a list of parts, empty if missing. Raises RowError."""
        if self.value is None:
            return []
        if not isinstance(self.value, list | tuple):
            raise self.wrong("must be a list")
        return [RowValue(item, self.where, f"{self.name}[{index}]") for index, item in enumerate(self.value)]

    @property
    def parsed(self) -> RowValue:
        """The value, parsed if it is JSON text. Raises RowError."""
        if not isinstance(self.value, str) or self.value.strip()[:1] not in ("{", "["):
            return self
        try:
            return replace(self, value=read_json(self.value))
        except ValueError as error:
            raise RowError(self.where, f"{self.name} is broken JSON: {error}") from error

    def text(self, *names: str) -> str:
        """Return the first non-empty one of these fields as text."""
        values = (self.object.get(name) for name in names)
        return next((str(value) for value in values if isinstance(value, str | int) and value != ""), "")

    def wrong(self, rule: str) -> RowError:
        """Return the error for a value that breaks a rule."""
        return RowError(self.where, f"{self.name or 'the row'} {rule}, found {shown(self.value)}")


def read_messages(rows: RowValue) -> tuple[Message, ...]:
    """Return messages in OpenAI's form. Raises RowError for an invalid one."""
    return tuple(map(read_message, rows.items))


def read_message(row: RowValue, role: str | None = None) -> Message:
    """Return a message in OpenAI's form, without fields that no model reads. Raises RowError.

    `role` applies to a message that names none.
    """
    given, content = row.object, row.object.get("content")
    role = given.get("role", role)
    if role not in ROLES:
        raise replace(row["role"], value=role).wrong(f"must be one of {', '.join(ROLES)}")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) for part in content):
            raise RowError(row.where, f"{row.name}.content must have objects for its parts")
        content = [dict(part) for part in content]
    elif content is not None and not isinstance(content, str):
        raise row["content"].wrong("must be text or a list of parts")
    if given.get("function_call"):
        raise row["function_call"].wrong("is an older form that models are not shown; write `tool_calls`")
    message: Message = {"role": role, "content": content}
    if content is None and isinstance(given.get("refusal"), str):
        message["content"] = given["refusal"]
    thinking = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(thinking, str) and role == "assistant":
        message["reasoning_content"] = thinking
    if calls := row["tool_calls"].items:
        named = [(call, call["function"].object) for call in calls]
        message["tool_calls"] = [
            tool_call(call, call["id"].value, function.get("name"), function.get("arguments"))
            for call, function in named
        ]
    return message | {name: given[name] for name in _KEPT if given.get(name) is not None}


def tool_call(call: RowValue, id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's form. Raises RowError without a name."""
    if not isinstance(name, str) or not name:
        raise RowError(call.where, f"{call.name} must name its function, found {shown(name)}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(id or ""), "type": "function", "function": {"name": name, "arguments": text}}


def read_tools(rows: RowValue) -> tuple[Tool, ...]:
    """Return tools in OpenAI's form, from rows with or without a `function` around them. Raises RowError."""
    tools = []
    for row in rows.items:
        named = row["function"] if "function" in row.object else row
        if not isinstance(named.object.get("name"), str):
            raise RowError(row.where, f"{row.name} must have a name, found {shown(named['name'].value)}")
        known = ("name", "description", "parameters", "strict")
        kept = {key: named.object[key] for key in known if key in named.object}
        tools.append({"type": "function", "function": kept})
    return tuple(tools)


def read_sampling(row: RowValue) -> Sampling:
    """Return a request's sampling settings. Raises RowError for an impossible value."""
    given = {ours: row.object[name] for name, ours in _SAMPLED.items() if row.object.get(name) is not None}
    try:
        return _SAMPLING.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        found = f"{row.name}.{at}: {first['msg']}, found {shown(given.get(at))}"
        raise RowError(row.where, found) from error


def read_usage(prompt: Any, completion: Any) -> Usage:
    """Return the token counts; 0 for a missing one."""
    counts = (
        count if type(count) in (int, float) and 0 <= count < 2**53 else 0 for count in (prompt, completion)
    )
    return Usage(*map(int, counts))


def make_score(
    where: str, name: Any, value: Any, reason: Any = "", *, call: str = "", trace: str = ""
) -> LoggedScore | SkippedEntry:
    """Return a score, or a LeftOut if it lacks a name or a finite number. Booleans count as numbers."""
    try:
        score = number(value)
    except ValueError:
        return SkippedEntry(where, f"feedback '{name}' that is not a number")
    if not isinstance(name, str) or not name or "/" in name or not is_score(score):
        return SkippedEntry(where, "feedback without a name or a finite number")
    return LoggedScore(where, name, score, reason if isinstance(reason, str) else "", call, trace)


def parse_time(part: RowValue) -> float:
    """Return a time in Unix seconds from ISO 8601, a datetime, or a number whose size shows its unit.

    0 without a value. Raises RowError.
    """
    value = part.value
    if value is None or value == "":
        return 0.0
    try:
        if isinstance(value, str) and not value.isdigit():
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        seconds = number(int(value) if isinstance(value, str) else value)
    except (ValueError, OverflowError, OSError) as error:
        raise RowError(part.where, f"{part.name} is not a time: {shown(value)}") from error
    unit = next((unit for least, unit in _UNITS if seconds >= least), 1.0)
    return seconds / unit if 0 <= seconds < 1e20 else 0.0


def parse_times(start: RowValue, end: RowValue) -> tuple[float, float]:
    """Return when a call began, in Unix seconds, and its duration in seconds; 0 if unknown."""
    began, ended = parse_time(start), parse_time(end)
    return began, max(0.0, ended - began) if began and ended else 0.0


def guess_finish_reason(answer: Message | None) -> str:
    """Return why an answer ended, for a log that does not say so."""
    return "tool_calls" if answer is not None and answer.get("tool_calls") else "stop"


def answered_calls(
    call: LoggedCall, answers: Sequence[tuple[Message, str]]
) -> Iterator[LoggedCall | SkippedEntry]:
    """Yield the call with each of several answers. Further ones are separate chats on its prompt."""
    for index, (message, reason) in enumerate(answers):
        answered = replace(call, answer=message, finish_reason=reason or "stop")
        if index:
            name, trace = f"{call.id}#{index}" if call.id else "", f"{call.trace or call.where}#{index}"
            answered = replace(answered, id=name, trace=trace)
        yield answered


def shown(value: Any) -> str:
    """Return a short form of a value for an error."""
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, list(value)[:6])) or 'nothing in it'}"
    return name_type(value) if isinstance(value, list) or value is None else f"{value!r:.60}"
