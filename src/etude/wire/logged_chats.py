"""Rows of logs in OpenAI's format: finished conversations, and requests with their responses.

{"messages": [...], "tools": [...]}
{"request": {"model": ..., "messages": [...]}, "response": {"object": "chat.completion", "choices": [...]}}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field
from pydantic_core import to_json

from etude.config.data_files import json_value, read_json_file, read_parquet, readable
from etude.core.call import ChatRequest, Completion, Sampling
from etude.core.data_model import name_type, number
from etude.core.errors import DatasetError, RequestError
from etude.core.evaluation import is_score
from etude.core.json_text import read_json
from etude.wire.bodies import check_conversation, plain_messages
from etude.wire.client import parse_completion
from etude.wire.retries import Refusal, Retryable
from etude.wire.sampling import change_sampling, validated


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
    request: ChatRequest
    completion: Completion | None = None
    """None if the call failed."""
    model: str = ""
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
_Name: TypeAlias = str | int | None


class _Request(BaseModel):
    messages: Annotated[list[Any] | None, _Parsed] = None
    tools: Annotated[list[Any] | None, _Parsed] = None
    model: str | None = None
    temperature: Any = None
    top_p: Any = None
    max_tokens: Any = Field(
        default=None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )

    def as_chat(self) -> ChatRequest:
        """Return the request. Raises RequestError if it is not OpenAI's."""
        # A weight says whether an answer is to be learned from.
        given = [
            {name: value for name, value in message.items() if name != "weight"}
            if isinstance(message, dict)
            else message
            for message in self.messages or ()
        ]
        messages, tools = plain_messages(given), tuple(self.tools or ())
        check_conversation((), tools)
        settings = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return ChatRequest(messages, tools, change_sampling(Sampling(), settings))


class _Row(_Request):
    """A conversation, or a request with its response."""

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
    timestamp: datetime | None = None
    request: Annotated[_Request | None, _Parsed] = None
    response: Annotated[dict[str, Any] | list[Any] | None, _Parsed] = None
    error: Any = None

    def records(self, where: str) -> Iterator[Record]:
        """Yield the row's calls, with its feedback on the last one. Raises RequestError."""
        feedback = [*self._read_feedback(where)]
        yield from (entry for entry in feedback if isinstance(entry, SkippedEntry))
        named = {"id": self.id or where, "trace": self.trace_id or "", "session": self.session or ""}
        facts: dict[str, Any] = {name: str(value) for name, value in named.items()}
        facts["expected"] = self.expected
        facts["scores"] = tuple(score for score in feedback if isinstance(score, LoggedScore))
        if self.messages is not None:
            yield from self._conversation(where, facts)
        elif self.request is None or self.response is None:
            raise RequestError("a row must have `messages`, or a `request` and its `response`")
        elif self.request.messages is None:
            yield SkippedEntry(where, "request without messages: not a chat completion")
        elif isinstance(self.response, list):
            yield SkippedEntry(where, "response in the chunks of a stream: log the complete response")
        else:
            yield from self._exchange(where, self.request, self.response, facts)

    def _conversation(self, where: str, facts: dict[str, Any]) -> Iterator[Record]:
        """Yield a call for each answer of a conversation, except those with weight 0."""
        request, given = self.as_chat(), self.messages or ()
        messages = request.messages
        answers = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and given[index].get("weight") != 0 and index
        ]
        if not answers:
            yield SkippedEntry(where, "conversation without an answer by the assistant")
            return
        if answers[-1] + 1 < len(messages):
            yield SkippedEntry(where, "messages after the last answer of a conversation")
        for index in answers:
            is_last = index == answers[-1]
            own = {} if is_last else {"id": f"{facts['id']}@{index}", "scores": ()}
            reason = "tool_calls" if messages[index].get("tool_calls") else "stop"
            yield LoggedCall(
                where,
                replace(request, messages=messages[:index]),
                Completion(messages[index], reason),
                model=self.model or "",
                is_whole=True,
                **facts | {"trace": facts["trace"] or where} | own,
            )

    def _exchange(
        self, where: str, request: _Request, response: dict[str, Any], facts: dict[str, Any]
    ) -> Iterator[Record]:
        """Yield the call of a request. Further answers to it are separate chats on its prompt."""
        at, created = self.timestamp, response.get("created")
        began = float(created) if isinstance(created, int | float) else 0.0
        if at is not None:
            began = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        model = str(response.get("model") or request.model or "")
        call = LoggedCall(where, request.as_chat(), model=model, began=max(0.0, began), **facts)
        if error := response.get("error") or self.error:
            reason = error.get("message") or error.get("type") if isinstance(error, dict) else error
            yield replace(call, error=str(reason or "an error without a message"))
            return
        choices = response.get("choices")
        if not choices or not isinstance(choices, list):
            yield SkippedEntry(where, "response without choices: not a chat completion, or cut off")
            return
        for index, choice in enumerate(choices):
            answered = call
            if index:
                name, trace = f"{call.id}#{index}", f"{call.trace or where}#{index}"
                answered = replace(call, id=name, trace=trace, scores=())
            try:
                answer = parse_completion(to_json({**response, "choices": [choice]}))
            except Retryable as problem:
                raise RequestError(f"response: {problem}") from problem
            except Refusal as refusal:
                yield replace(answered, error=str(refusal))
                continue
            completion = Completion(answer.message, answer.finish_reason, usage=answer.usage)
            yield replace(answered, completion=completion)

    def _read_feedback(self, where: str) -> Iterator[LoggedScore | SkippedEntry]:
        """Yield feedback: numbers, or objects with `score` or `value`, and a `comment` or `reason`."""
        own = {"score": self.score, "reward": self.reward, "feedback": self.feedback}
        for name, value in {**own, **(self.scores or {})}.items():
            if value is None:
                continue
            given = value if isinstance(value, dict) else {"score": value}
            reason = given.get("comment", given.get("reason"))
            try:
                score = number(given.get("score", given.get("value")))
            except ValueError:
                score = math.nan
            if name and "/" not in name and is_score(score):
                yield LoggedScore(name, score, reason if isinstance(reason, str) else "")
            else:
                yield SkippedEntry(where, f"feedback '{name}' that is not a finite number")


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
    """Return the records of a row. Raises DatasetError."""
    if isinstance(row, DatasetError):
        raise row
    if not isinstance(row, Mapping):
        raise DatasetError(f"{where}: a row must be an object, found {name_type(row)}")
    try:
        return [*validated(_Row, row).records(where)]
    except RequestError as error:
        raise DatasetError(f"{where}: {error}") from error
