"""One preference: two episodes of one example, told apart where their tokens part.

Rafailov et al. (2023). Over several turns a response is the whole rest of the conversation. The
observations in it were not sampled and are masked out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from etude.algorithms.branches import Branch
from etude.core.message import Message, OpenAIMessage, message_key, text_of
from etude.core.trajectory import DPOItem


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A branch as tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """0.0 for tokens that were not sampled; None when an engine did not tell them."""
    sampled: tuple[bool, ...]

    def named(self, start: int, name: str) -> dict[str, Any]:
        """The fields of a DPOItem for the response that begins at `start`."""
        return {
            f"{name}_ids": self.ids[start:],
            f"{name}_logprobs": None if self.logprobs is None else self.logprobs[start:],
            f"{name}_mask": self.sampled[start:],
        }


def same_prompt(a: Branch, b: Branch) -> bool:
    """Whether both branches began with the same prompt: the tokens where they are known."""
    first, second = a.calls[0], b.calls[0]
    ids = [call.completion.prompt_ids for call in (first, second) if call.completion is not None]
    if None not in ids:
        return ids[0] == ids[1]
    return _keys(first.request.messages) == _keys(second.request.messages)


def preference(chosen: Branch, rejected: Branch) -> DPOItem | None:
    """The preference of one branch over another; None when there is no difference to learn from.

    That is so when the sequences are equal, or when nothing was sampled after they part.
    """
    prompt, *responses = parted_messages(chosen, rejected)
    good, bad = _sequence(chosen), _sequence(rejected)
    if good is None or bad is None:
        return None if _keys(responses[0]) == _keys(responses[1]) else _item(prompt, *responses)
    start = _common(good.ids, bad.ids)
    if not any(good.sampled[start:]) or not any(bad.sampled[start:]):
        return None
    tokens = {"prompt_ids": good.ids[:start], **good.named(start, "chosen"), **bad.named(start, "rejected")}
    return _item(prompt, *responses, **tokens)


def _sequence(branch: Branch) -> _Sequence | None:
    """The tokens of a branch; None where an engine did not tell them."""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = ()
    sampled: tuple[bool, ...] = ()
    for call in branch.calls:
        completion = call.completion
        if completion is None or completion.prompt_ids is None or completion.completion_ids is None:
            return None
        context = len(completion.prompt_ids) - len(ids)
        if logprobs is not None:
            told = completion.logprobs
            logprobs = None if told is None else logprobs + (0.0,) * context + told
        sampled += (False,) * context + (True,) * len(completion.completion_ids)
        ids = completion.prompt_ids + completion.completion_ids
    return _Sequence(ids, logprobs, sampled)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def parted_messages(chosen: Branch, rejected: Branch) -> tuple[list[Message], list[Message], list[Message]]:
    """The messages that both branches share, and what followed in each."""
    good, bad = _messages(chosen), _messages(rejected)
    pairs = zip(_keys(good), _keys(bad), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return good[:shared], good[shared:], bad[shared:]


def _messages(branch: Branch) -> list[Message]:
    last = branch.calls[-1]
    reply = [last.completion.message] if last.completion is not None else []
    return [*last.request.messages, *reply]


def _keys(messages: list[Message] | tuple[Message, ...]) -> list[str]:
    return [message_key(message) for message in messages]


def _item(prompt: list[Message], chosen: list[Message], rejected: list[Message], **tokens: Any) -> DPOItem:
    return DPOItem(
        prompt=[OpenAIMessage.model_validate(_flat(message)) for message in prompt],
        chosen_response=_response(chosen),
        rejected_response=_response(rejected),
        **tokens,
    )


def _flat(message: Message) -> Message:
    """The message with text for content; parts that are not text are described by themselves."""
    return message | {"content": text_of(message)} if isinstance(message.get("content"), list) else message


def _response(messages: list[Message]) -> str:
    """One reply as its text; a longer continuation as a transcript."""
    if len(messages) == 1:
        return _written(messages[0])
    return "\n\n".join(f"[{str(message.get('role')).upper()}]: {_written(message)}" for message in messages)


def _written(message: Message) -> str:
    """The text of a message; its tool calls as JSON when there is no text."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return text_of(message) or (json.dumps(calls) if calls else "")
