"""Rows of logs in OpenAI's format: finished conversations, and requests with their responses.

{"messages": [...], "tools": [...]}
{"request": {"model": ..., "messages": [...]}, "response": {"object": "chat.completion", "choices": [...]}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError

from etude.config.data_files import json_value, read_json_file, read_parquet, readable
from etude.core.call import NO_USAGE, PLAIN_SAMPLING, Sampling, Temperature, TopP, Usage
from etude.core.data_model import name_type, number
from etude.core.errors import DatasetError
from etude.core.evaluation import is_score
from etude.core.json_text import read_json
from etude.core.message import Message, Tool
from etude.wire.dialect import tool_call
from etude.wire.sampling import Text, describe_problems


@dataclass(frozen=True, slots=True)
class LoggedScore:
    """A number that somebody gave to a call."""

    name: str
    value: float
    reason: str = ""


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
    id: str = ""
    """Unique in a log."""
    trace: str = ""
    """Calls of one trace form one chat."""
    session: str = ""
    """A call only continues a chat of the same session."""
    is_whole: bool = False
    """Whether the log has each chat whole, so that the call continues no other chat."""
    expected: Any = None
    scores: tuple[LoggedScore, ...] = ()


@dataclass(frozen=True, slots=True)
class SkippedEntry:
    """A part of a log that forms no chat."""

    where: str
    reason: str


Record: TypeAlias = LoggedCall | SkippedEntry


def _parse(value: Any) -> Any:
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
    return read_json(value) if is_json else value


_Parsed = BeforeValidator(_parse)
"""Parses a column that holds JSON text."""


class _Function(BaseModel):
    name: Text
    arguments: str | dict[str, Any] | None = None


class _ToolCall(BaseModel):
    id: str | None = None
    function: _Function

    def as_chat(self) -> dict[str, Any]:
        given = self.function.arguments or {}
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return tool_call(self.id or "", self.function.name, text)


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    tool_calls: list[_ToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    """0 for an answer that is not to be learned from."""
    function_call: None = None
    """An older form, which models are not shown."""

    def as_chat(self) -> Message:
        """Return the message without fields that no model reads."""
        content = self.refusal if self.content is None else self.content
        calls = [call.as_chat() for call in self.tool_calls or ()]
        others = self.model_dump(include={"reasoning_content", "name", "tool_call_id"}, exclude_none=True)
        return {"role": self.role, "content": content, **others} | ({"tool_calls": calls} if calls else {})


class _Answer(_Message):
    role: Literal["assistant"] = "assistant"


class _ToolFunction(BaseModel):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(BaseModel):
    function: _ToolFunction

    def as_chat(self) -> Tool:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class _Request(BaseModel):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )

    def call(self, where: str, **fields: Any) -> LoggedCall:
        """Return the call for this request, without its answer."""
        given = self.model_dump(include={"temperature", "top_p", "max_tokens"}, exclude_none=True)
        return LoggedCall(
            where,
            tuple(message.as_chat() for message in self.messages),
            None,
            tuple(tool.as_chat() for tool in self.tools or ()),
            sampling=Sampling(**given),
            **fields,
        )


class _Choice(BaseModel):
    message: _Answer
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)


class _Response(BaseModel):
    choices: list[_Choice] | None = None
    model: str | None = None
    created: datetime | None = None
    usage: _Usage | None = None
    error: Any = None


_Name: TypeAlias = str | int | None


class _Row(BaseModel):
    """The fields that both kinds of rows have."""

    id: _Name = Field(default=None, validation_alias=AliasChoices("id", "request_id"))
    trace_id: _Name = None
    session: _Name = Field(
        default=None, validation_alias=AliasChoices("session_id", "conversation_id", "thread_id")
    )
    expected: Any = Field(default=None, validation_alias=AliasChoices("expected", "answer"))
    score: Any = None
    reward: Any = None
    feedback: Any = None
    scores: dict[str, Any] | None = None

    def read_feedback(self, where: str) -> Iterator[LoggedScore | SkippedEntry]:
        """Yield feedback: numbers, or objects with `score` or `value`, and a `comment` or `reason`."""
        own = {"score": self.score, "reward": self.reward, "feedback": self.feedback}
        for name, value in {**own, **(self.scores or {})}.items():
            given = value if isinstance(value, dict) else {"score": value}
            reason = given.get("comment", given.get("reason"))
            try:
                score = number(given.get("score", given.get("value")))
            except ValueError:
                score = math.nan
            if value is None:
                continue
            if name and "/" not in name and is_score(score):
                yield LoggedScore(name, score, reason if isinstance(reason, str) else "")
            else:
                yield SkippedEntry(where, f"feedback '{name}' that is not a finite number")

    def facts(self, where: str) -> dict[str, Any]:
        """Return the fields of the row's calls."""
        named = {"id": self.id or where, "trace": self.trace_id or "", "session": self.session or ""}
        return {**{name: str(value) for name, value in named.items()}, "expected": self.expected}


class _Conversation(_Row):
    messages: Annotated[list[_Message], _Parsed]
    tools: Annotated[list[_Tool] | None, _Parsed] = None
    model: str | None = None

    def calls(self, where: str, scores: tuple[LoggedScore, ...]) -> Iterator[Record]:
        """Yield a call for each answer, except those with weight 0. Feedback is on the last one."""
        messages = [message.as_chat() for message in self.messages]
        answers = [
            index
            for index, message in enumerate(self.messages)
            if message.role == "assistant" and message.weight != 0 and index
        ]
        if not answers:
            yield SkippedEntry(where, "conversation without an answer by the assistant")
            return
        if answers[-1] + 1 < len(messages):
            yield SkippedEntry(where, "messages after the last answer of a conversation")
        facts = self.facts(where)
        for index in answers:
            is_last = index == answers[-1]
            own = facts | {"id": facts["id"] if is_last else f"{facts['id']}@{index}"}
            yield LoggedCall(
                where,
                tuple(messages[:index]),
                messages[index],
                tuple(tool.as_chat() for tool in self.tools or ()),
                model=self.model or "",
                finish_reason="tool_calls" if messages[index].get("tool_calls") else "stop",
                is_whole=True,
                scores=scores if is_last else (),
                **own | {"trace": own["trace"] or where},
            )


class _Exchange(_Row):
    request: Annotated[_Request, _Parsed]
    response: Annotated[_Response, _Parsed]
    timestamp: datetime | None = None
    error: Any = None

    def calls(self, where: str, scores: tuple[LoggedScore, ...]) -> Iterator[Record]:
        """Yield the call. Further answers to it are separate chats on its prompt."""
        response, usage = self.response, self.response.usage or _Usage()
        at = self.timestamp or response.created
        call = self.request.call(
            where,
            model=response.model or self.request.model or "",
            usage=Usage(usage.prompt_tokens, usage.completion_tokens),
            began=0.0 if at is None else max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()),
            scores=scores,
            **self.facts(where),
        )
        error = response.error or self.error
        if error:
            reason = error.get("message") or error.get("type") if isinstance(error, dict) else error
            yield replace(call, error=str(reason or "an error without a message"))
        elif not response.choices:
            yield SkippedEntry(where, "response without choices: not a chat completion, or cut off")
        for index, choice in enumerate(() if error else response.choices or ()):
            reason = choice.finish_reason or ("tool_calls" if choice.message.tool_calls else "stop")
            answered = replace(call, answer=choice.message.as_chat(), finish_reason=reason)
            if index:
                trace = f"{call.trace or where}#{index}"
                answered = replace(answered, id=f"{call.id}#{index}", trace=trace, scores=())
            yield answered


def read_records(path: Path, *, skip_broken: bool = False) -> Iterator[Record]:
    """Read a log: JSON Lines, a JSON list (`.json`) or Parquet.

    Raises DatasetError for an unreadable file, and for a row that breaks the format. `skip_broken` leaves
    such rows out.
    """
    for where, row in _rows(path):
        try:
            yield from _read_row(where, row)
        except DatasetError as error:
            if not skip_broken:
                raise DatasetError(f"{error}; fix it, or leave such rows out with --skip-broken") from error
            yield SkippedEntry(where, "broken row")


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place; a line that is not JSON as the error."""
    if path.suffix == ".parquet":
        yield from read_parquet(path)
    elif path.suffix == ".json":
        data = read_json_file(path)
        for index, item in enumerate(data if isinstance(data, list) else [data], start=1):
            yield f"{path}: row {index}", item
    else:
        with readable(path), path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for index, line in enumerate(file, start=1):
                row: Any = None
                try:
                    row = json_value(line.rstrip("\n"), path, index) if line.strip() else None
                except DatasetError as error:
                    row = error
                if row is not None:
                    yield f"{path}:{index}", row


def _read_row(where: str, row: Any) -> list[Record]:
    """Return the calls of a row. Raises DatasetError."""
    if isinstance(row, DatasetError):
        raise row
    if not isinstance(row, Mapping):
        raise DatasetError(f"{where}: a row must be an object, found {name_type(row)}")
    kind: type[_Conversation | _Exchange] = _Conversation if "messages" in row else _Exchange
    request = row.get("request")
    if isinstance(request, Mapping) and "messages" not in request:
        return [SkippedEntry(where, "request without messages: not a chat completion")]
    if isinstance(row.get("response"), list):
        return [SkippedEntry(where, "response in the chunks of a stream: log the complete response")]
    try:
        known = kind.model_validate(row)
    except ValidationError as error:
        problem, _ = describe_problems(error.errors(include_url=False, include_input=False)[:1])
        raise DatasetError(f"{where}: {problem}") from error
    feedback = [*known.read_feedback(where)]
    scores = tuple(score for score in feedback if isinstance(score, LoggedScore))
    return [*known.calls(where, scores), *(each for each in feedback if isinstance(each, SkippedEntry))]
