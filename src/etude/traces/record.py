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


@dataclass(frozen=True, slots=True)
class Part:
    """A value in a row of a log, and where it stands."""

    value: Any
    where: str
    """`file:line`."""
    name: str = ""
    """Its place in the row: `messages[0].role`."""

    def __getitem__(self, name: str) -> Part:
        """A field of an object, which may be missing. Raises RowError."""
        return Part(self.object.get(name), self.where, f"{self.name}.{name}" if self.name else name)

    @property
    def object(self) -> Mapping[str, Any]:
        """An object, which may be missing. Raises RowError."""
        if self.value is None:
            return {}
        if not isinstance(self.value, Mapping):
            raise self.wrong("must be an object")
        return self.value

    @property
    def items(self) -> list[Part]:
        """The items of a list, which may be missing. Raises RowError."""
        if self.value is None:
            return []
        if not isinstance(self.value, list | tuple):
            raise self.wrong("must be a list")
        return [Part(item, self.where, f"{self.name}[{index}]") for index, item in enumerate(self.value)]

    @property
    def parsed(self) -> Part:
        """The value where it is written as JSON text, or itself. Raises RowError."""
        if not isinstance(self.value, str) or self.value.strip()[:1] not in ("{", "["):
            return self
        try:
            return replace(self, value=read_json(self.value))
        except ValueError as error:
            raise RowError(self.where, f"{self.name} is broken JSON: {error}") from error

    def text(self, *names: str) -> str:
        """The first of these fields of an object that says something, as text."""
        values = (self.object.get(name) for name in names)
        return next((str(value) for value in values if isinstance(value, str | int) and value != ""), "")

    def wrong(self, rule: str) -> RowError:
        """The error for a value that breaks a rule."""
        return RowError(self.where, f"{self.name or 'the row'} {rule}, found {shown(self.value)}")


def messages_of(rows: Part) -> tuple[Message, ...]:
    """Messages in OpenAI's form. Raises RowError for one that is not."""
    return tuple(map(message_of, rows.items))


def message_of(row: Part, role: str | None = None) -> Message:
    """A message in OpenAI's form, without what no model reads. Raises RowError.

    `role` is that of a message that does not say it.
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


def tool_call(call: Part, id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call of a tool as OpenAI writes it. Raises RowError without a name."""
    if not isinstance(name, str) or not name:
        raise RowError(call.where, f"{call.name} must name its function, found {shown(name)}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(id or ""), "type": "function", "function": {"name": name, "arguments": text}}


def tools_of(rows: Part) -> tuple[Tool, ...]:
    """Tools in OpenAI's form, with or without `function` around what they are. Raises RowError."""
    tools = []
    for row in rows.items:
        named = row["function"] if "function" in row.object else row
        if not isinstance(named.object.get("name"), str):
            raise RowError(row.where, f"{row.name} must have a name, found {shown(named['name'].value)}")
        known = ("name", "description", "parameters", "strict")
        kept = {key: named.object[key] for key in known if key in named.object}
        tools.append({"type": "function", "function": kept})
    return tuple(tools)


def sampling_of(row: Part) -> Sampling:
    """How a call was sampled, as far as a request says. Raises RowError for an impossible value."""
    given = {ours: row.object[name] for name, ours in _SAMPLED.items() if row.object.get(name) is not None}
    try:
        return _SAMPLING.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        found = f"{row.name}.{at}: {first['msg']}, found {shown(given.get(at))}"
        raise RowError(row.where, found) from error


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


def time_of(part: Part) -> float:
    """A time in Unix seconds: of text in ISO 8601, a time, or a number whose size tells its unit; 0 for none.

    Raises RowError.
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
        raise RowError(part.where, f"{part.name} is no time: {shown(value)}") from error
    unit = next((unit for least, unit in _UNITS if seconds >= least), 1.0)
    return seconds / unit if 0 <= seconds < 1e20 else 0.0


def times_of(start: Part, end: Part) -> tuple[float, float]:
    """When a call began, in Unix seconds, and the seconds that it took; 0 where that is not known."""
    began, ended = time_of(start), time_of(end)
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
