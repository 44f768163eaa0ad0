"""What a judge reads of an episode: its conversations as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalInputItem
from etude.core.message import Message

_Said: TypeAlias = tuple[Any, Any, Any]


def messages_of(item: EvalInputItem) -> list[Message]:
    """The episode's messages in order, each once, and last the output where no message says it.

    Where a call does not go on from the call before it, a message of the role `conversation` says so.
    """
    messages = [] if item.episode is None else _conversations(item.episode)
    if not messages or messages[-1].get("content") != item.output_obj:
        messages.append({"role": "output", "content": item.output_obj})
    return messages


def common_prefix(transcripts: Sequence[Sequence[Message]]) -> int:
    """How many messages all transcripts begin with alike, leaving at least one of each."""
    shortest = max(min(map(len, transcripts), default=1) - 1, 0)
    for index in range(shortest):
        if any(transcript[index] != transcripts[0][index] for transcript in transcripts):
            return index
    return shortest


def _conversations(episode: EpisodeRecord) -> list[Message]:
    messages: list[Message] = []
    threads: list[list[_Said]] = []
    current: list[_Said] | None = None
    for call in episode.calls:
        prompt = [_said(message) for message in call.request.messages]
        continued = [thread for thread in threads if prompt[: len(thread)] == thread]
        thread = max(continued, key=len, default=None)
        if thread is None:
            thread = []
            threads.append(thread)
        if current is not None and thread is not current:
            messages.append({"role": "conversation", "content": f"{call.function}, {call.model}"})
        messages += [*call.request.messages[len(thread) :], _answer(call)]
        answered = [] if call.completion is None else [_said(call.completion.message)]
        thread[:] = [*prompt, *answered]
        current = thread
    return messages


def _said(message: Message) -> _Said:
    """What makes a message the same one: agents do not always repeat its other fields."""
    return message.get("role"), message.get("content") or None, message.get("tool_calls") or None


def _answer(call: Call) -> Message:
    if call.completion is None:
        return {"role": "error", "content": call.error}
    return call.completion.message
