"""Chats as OpenAI's API has them: rows of the fine-tuning format, and requests logged with their responses.

{"messages": [...], "tools": [...]}
{"request": {"model": ..., "messages": [...]}, "response": {"object": "chat.completion", "choices": [...]}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from etude.core.message import Message
from etude.traces.record import (
    NO_MESSAGE,
    LeftOut,
    LoggedCall,
    Record,
    RowError,
    choices_of,
    finish_reason_of,
    list_of,
    mapping_of,
    message_of,
    messages_of,
    parsed,
    sampling_of,
    score_of,
    shown,
    text_in,
    time_of,
    tools_of,
    usage_of,
)

_FEEDBACK = ("score", "reward", "feedback")


def fits(row: Mapping[str, Any]) -> bool:
    """Whether a row is of this format."""
    return ("request" in row and "response" in row) or "messages" in row


def read(row: Mapping[str, Any], where: str) -> Iterator[Record]:
    """The calls of a row, and its feedback. Raises RowError."""
    trace = text_in(row, "trace_id") or (where if "messages" in row else "")
    name = text_in(row, "id", "request_id") or where
    calls = _conversation if "messages" in row else _exchange
    yield from calls(row, where, trace, name)
    for field in _FEEDBACK:
        if row.get(field) is not None:
            yield from _feedback(row[field], field, where, name)
    for field, value in mapping_of(row.get("scores"), where, "scores").items():
        yield from _feedback(value, field, where, name)


def _feedback(value: Any, name: str, where: str, call: str) -> Iterator[Record]:
    """A number, or an object with `score` or `value`, and a `comment` or `reason`."""
    if isinstance(value, Mapping):
        score = value.get("score", value.get("value"))
        yield score_of(where, name, score, text_in(value, "comment", "reason"), call=call)
    else:
        yield score_of(where, name, value, call=call)


def _conversation(row: Mapping[str, Any], where: str, trace: str, name: str) -> Iterator[Record]:
    """A finished conversation: a call for each answer, but for those of weight 0."""
    messages = messages_of(row["messages"], where, "messages")
    tools = tools_of(row.get("tools"), where, "tools")
    answers = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0 and index
    ]
    if not answers:
        yield LeftOut(where, "conversation without an answer of the assistant")
        return
    if answers[-1] + 1 < len(messages):
        yield LeftOut(where, "messages after the last answer of a conversation")
    for index in answers:
        answer = {key: value for key, value in messages[index].items() if key != "weight"}
        yield LoggedCall(
            where,
            messages[:index],
            answer,
            tools,
            model=text_in(row, "model"),
            finish_reason=finish_reason_of(answer),
            # Feedback is on the whole: the last answer has the row's own name.
            id=name if index == answers[-1] else f"{name}@{index}",
            trace=trace,
            session=text_in(row, "session_id", "conversation_id", "thread_id"),
            is_whole=True,
            expected=row.get("expected", row.get("answer")),
        )


def _exchange(row: Mapping[str, Any], where: str, trace: str, name: str) -> Iterator[Record]:
    """A request and its response."""
    request = mapping_of(parsed(row["request"], where, "request"), where, "request")
    response = parsed(row["response"], where, "response")
    if "messages" not in request:
        yield LeftOut(where, "request without messages: no chat completion")
        return
    if isinstance(response, list):
        yield LeftOut(where, "response in the chunks of a stream: log the whole of it")
        return
    answered = mapping_of(response, where, "response")
    usage = mapping_of(answered.get("usage"), where, "response.usage")
    call = LoggedCall(
        where,
        messages_of(request["messages"], where, "request.messages"),
        None,
        tools_of(request.get("tools"), where, "request.tools"),
        model=text_in(answered, "model") or text_in(request, "model"),
        sampling=sampling_of(request, where, "request"),
        usage=usage_of(usage.get("prompt_tokens"), usage.get("completion_tokens")),
        began=time_of(row.get("timestamp") or answered.get("created"), where, "timestamp"),
        id=name,
        trace=trace,
        session=text_in(row, "session_id", "conversation_id", "thread_id"),
        expected=row.get("expected", row.get("answer")),
    )
    error = answered.get("error") or row.get("error")
    if error:
        reason = text_in(error, "message", "type", "code") if isinstance(error, Mapping) else str(error)
        yield replace(call, error=reason or NO_MESSAGE)
        return
    choices = list_of(answered.get("choices"), where, "response.choices")
    if not choices:
        yield LeftOut(where, "response without choices: no chat completion, or one that was cut off")
        return
    yield from choices_of(call, [_choice(choice, where, index) for index, choice in enumerate(choices)])


def _choice(value: Any, where: str, index: int) -> tuple[Message, str]:
    what = f"response.choices[{index}]"
    choice = mapping_of(value, where, what)
    message = mapping_of(choice.get("message"), where, f"{what}.message")
    if not message:
        raise RowError(where, f"{what} must have a message, found {shown(choice)}")
    answer = message_of({"role": "assistant", **message}, where, f"{what}.message")
    return answer, text_in(choice, "finish_reason")
