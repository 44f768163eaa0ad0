"""OpenAI's chat completions, as agents speak it: requests in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from etude.core.call import Completion
from etude.core.errors import RequestError
from etude.wire.bodies import ChatCompletionBody
from etude.wire.dialect import (
    ChatBody,
    Dialect,
    Event,
    RecordedCompletion,
    usage_object,
    validated,
)

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have, in the API."""

_REPLACEMENT = "\ufffd"

TokenName: TypeAlias = Callable[[int], str]
"""A token's text, or `named_by_id`."""

TokenLogprob: TypeAlias = tuple[int, float, Sequence[tuple[int, float]]]
"""A sampled token, its logprob, and the most likely ones with theirs."""


class ChatDialect(Dialect):
    """`POST /chat/completions`: messages are not translated, and so need not be remembered."""

    def parse(self, body: Any) -> ChatBody:
        """Read a chat completion request, which may leave the model to the episode."""
        known = validated(ChatCompletionBody, body, model="")
        if known.n not in (None, 1):
            raise RequestError(f"parameter 'n' can only be 1 here, found {known.n}")
        return known.request()

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """The `chat.completion` object."""
        completion = recorded.completion
        logprobs = recorded_logprobs(completion) if asked.logprobs else None
        reply = {
            "id": recorded.id,
            "object": "chat.completion",
            "created": created,
            "model": recorded.model,
            "choices": [chat_choice(0, completion, asked, logprobs)],
            "usage": usage_object(completion.usage.prompt_tokens, completion.usage.completion_tokens),
        }
        return reply | ({"prompt_token_ids": completion.prompt_ids} if asked.return_token_ids else {})

    def events(self, reply: dict[str, Any], asked: ChatBody) -> Iterator[Event]:
        """The `chat.completion.chunk` objects, and the end."""
        [choice] = reply["choices"]
        head = {name: reply[name] for name in ("id", "object", "created", "model")}
        head["object"] += ".chunk"
        usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}
        content, *rest = message_deltas(choice["message"])
        extras = {name: value for name, value in content.items() if name != "content"}
        deltas = [
            chat_delta(0, {"role": "assistant", "content": "", **extras}),
            chat_delta(
                0,
                {"content": content["content"]} if content["content"] else {},
                logprobs=choice["logprobs"],
                token_ids=choice.get("token_ids"),
            ),
            *(chat_delta(0, delta) for delta in rest),
            chat_delta(0, {}, choice["finish_reason"]),
        ]
        for delta in deltas:
            yield None, {**head, "choices": [delta], **usage}
        if asked.include_usage:
            yield None, {**head, "choices": [], "usage": reply["usage"]}
        yield None, "[DONE]"


def chat_choice(
    index: int, completion: Completion, asked: ChatBody, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """A choice of a chat completion."""
    choice = {
        "index": index,
        "message": {"content": None} | completion.message | {"role": "assistant"},
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs,
    }
    return choice | ({"token_ids": completion.completion_ids} if asked.return_token_ids else {})


def chat_delta(
    index: int,
    delta: dict[str, Any],
    finish_reason: str | None = None,
    *,
    logprobs: dict[str, Any] | None = None,
    token_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """A piece of a choice in a stream."""
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
    return choice if token_ids is None else choice | {"token_ids": token_ids}


def message_deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message in pieces: all but its calls of tools, then each of these."""
    yield {name: value for name, value in message.items() if name not in ("role", "tool_calls")}
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": index, **call}]}


def named_by_id(token: int) -> str:
    """vLLM's name of a token whose text does not matter."""
    return f"token_id:{token}"


def logprobs_object(tokens: Iterable[TokenLogprob], name: TokenName) -> dict[str, Any]:
    """The `logprobs` of a choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = name(token)
        # A token that is a part of a character has no text of its own, and so none to give the bytes of.
        is_text = name is not named_by_id and _REPLACEMENT not in text
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if is_text else None}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*other) for other in top]}
        for token, logprob, top in tokens
    ]
    return {"content": content, "refusal": None}


def recorded_logprobs(completion: Completion) -> dict[str, Any] | None:
    """The `logprobs` of a recorded completion, whose tokens are named by their ids where it has these."""
    if completion.logprobs is None:
        return None
    ids, name = completion.completion_ids, named_by_id
    if ids is None:
        ids, name = tuple(range(len(completion.logprobs))), lambda token: ""
    tokens = ((token, logprob, ()) for token, logprob in zip(ids, completion.logprobs, strict=True))
    return logprobs_object(tokens, name)


def finite(logprob: float) -> float:
    """The logprob as JSON can have it."""
    return max(logprob, LOWEST_LOGPROB)
