"""Chats in OpenAI's format: rows of the fine-tuning format, and requests logged with their responses.

{"messages": [...], "tools": [...]}
{"request": {"model": ..., "messages": [...]}, "response": {"object": "chat.completion", "choices": [...]}}
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from etude.core.message import Message
from etude.wire import trace_record
from etude.wire.trace_record import LoggedCall, Record, RowValue, SkippedEntry


def fits(row: Mapping[str, Any]) -> bool:
    """Return whether a row has this format."""
    return ("request" in row and "response" in row) or "messages" in row


def read(row: RowValue) -> Iterator[Record]:
    """Yield the calls of a row, and its feedback. Raises RowError."""
    is_whole = "messages" in row.object
    trace = row.text("trace_id") or (row.where if is_whole else "")
    name = row.text("id", "request_id") or row.where
    facts = {"session": row.text("session_id", "conversation_id", "thread_id"), "trace": trace}
    expected = row.object.get("expected", row.object.get("answer"))
    yield from (_conversation if is_whole else _exchange)(row, name, {**facts, "expected": expected})
    for field in ("score", "reward", "feedback"):
        if row[field].value is not None:
            yield _feedback(row[field], field, name)
    scores = row["scores"]
    for field in scores.object:
        yield _feedback(scores[field], field, name)


def _feedback(given: RowValue, name: str, call: str) -> Record:
    """Read feedback: a number, or an object with `score` or `value`, and a `comment` or `reason`."""
    if isinstance(given.value, Mapping):
        score = given.value.get("score", given.value.get("value"))
        return trace_record.make_score(given.where, name, score, given.text("comment", "reason"), call=call)
    return trace_record.make_score(given.where, name, given.value, call=call)


def _conversation(row: RowValue, name: str, facts: Mapping[str, Any]) -> Iterator[Record]:
    """Yield a call for each answer of a finished conversation, except those with weight 0."""
    messages, tools = trace_record.read_messages(row["messages"]), trace_record.read_tools(row["tools"])
    answers = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0 and index
    ]
    if not answers:
        yield SkippedEntry(row.where, "conversation without an answer by the assistant")
        return
    if answers[-1] + 1 < len(messages):
        yield SkippedEntry(row.where, "messages after the last answer of a conversation")
    for index in answers:
        answer = {key: value for key, value in messages[index].items() if key != "weight"}
        yield LoggedCall(
            row.where,
            messages[:index],
            answer,
            tools,
            model=row.text("model"),
            finish_reason=trace_record.guess_finish_reason(answer),
            # Feedback is on the whole, so the last answer gets the row's own name.
            id=name if index == answers[-1] else f"{name}@{index}",
            is_whole=True,
            **facts,
        )


def _exchange(row: RowValue, name: str, facts: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the call of a request and its response."""
    request, response = row["request"].parsed, row["response"].parsed
    if "messages" not in request.object:
        yield SkippedEntry(row.where, "request without messages: not a chat completion")
        return
    if isinstance(response.value, list):
        yield SkippedEntry(row.where, "response in the chunks of a stream: log the complete response")
        return
    usage = response["usage"].object
    at = row["timestamp"]
    call = LoggedCall(
        row.where,
        trace_record.read_messages(request["messages"]),
        None,
        trace_record.read_tools(request["tools"]),
        model=response.text("model") or request.text("model"),
        sampling=trace_record.read_sampling(request),
        usage=trace_record.read_usage(usage.get("prompt_tokens"), usage.get("completion_tokens")),
        began=trace_record.parse_time(at if at.value else replace(at, value=response["created"].value)),
        id=name,
        **facts,
    )
    error = response["error"] if response["error"].value else row["error"]
    if error.value:
        is_object = isinstance(error.value, Mapping)
        reason = error.text("message", "type", "code") if is_object else str(error.value)
        yield replace(call, error=reason or trace_record.NO_MESSAGE)
        return
    choices = response["choices"].items
    if not choices:
        yield SkippedEntry(row.where, "response without choices: not a chat completion, or cut off")
        return
    yield from trace_record.answered_calls(call, [*map(_choice, choices)])


def _choice(choice: RowValue) -> tuple[Message, str]:
    message = choice["message"]
    if not message.object:
        raise choice.wrong("must have a message")
    return trace_record.read_message(message, "assistant"), choice.text("finish_reason")
