"""OpenAI's chat completions, as agents speak it: requests in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etude.core.call import Completion
from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.store.plain import plain
from etude.wire.dialect import (
    BOOKKEEPING,
    ChatBody,
    Dialect,
    Event,
    RecordedCompletion,
    require_honoured,
    usage_object,
)
from etude.wire.sampling import SAMPLING_NAMES

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have, in the API."""

_READ_HERE = {"model", "messages", "tools", "max_completion_tokens", *SAMPLING_NAMES}
_PRESENTATION = {"stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids"}
_FREE = _READ_HERE | _PRESENTATION | BOOKKEEPING
"""Parameters that may have any value: the last two sets do not change what is sampled."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
}
"""Parameters that cannot be honoured, and the values at which they change nothing."""


class ChatDialect(Dialect):
    """`POST /chat/completions`: messages are not translated, and so need not be remembered."""

    def parse(self, body: Any) -> ChatBody:
        """Read a chat completion request."""
        body = require_honoured(body, _FREE, _NEUTRAL)
        sampling = {name: body[name] for name in SAMPLING_NAMES if body.get(name) is not None}
        if body.get("max_completion_tokens") is not None:
            sampling["max_tokens"] = body["max_completion_tokens"]
        return ChatBody(
            model=str(body.get("model") or ""),
            messages=plain_messages(body.get("messages")),
            tools=tuple(_checked_tool(tool) for tool in _list("tools", body.get("tools") or [])),
            sampling=sampling,
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            logprobs=bool(body.get("logprobs")),
            return_token_ids=bool(body.get("return_token_ids")),
        )

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """The `chat.completion` object."""
        completion = recorded.completion
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"content": None} | completion.message | {"role": "assistant"},
            "finish_reason": completion.finish_reason,
            "logprobs": logprobs_object(completion) if asked.logprobs else None,
        }
        wire: dict[str, Any] = {
            "id": recorded.id,
            "object": "chat.completion",
            "created": created,
            "model": recorded.model,
            "choices": [choice],
            "usage": usage_object(completion.usage.prompt_tokens, completion.usage.completion_tokens),
        }
        if asked.return_token_ids:
            wire["prompt_token_ids"] = completion.prompt_ids
            choice["token_ids"] = completion.completion_ids
        return wire

    def events(self, reply: dict[str, Any], asked: ChatBody) -> Iterator[Event]:
        """The `chat.completion.chunk` objects, and the end."""
        [choice] = reply["choices"]
        message: Message = choice["message"]
        head = {name: reply[name] for name in ("id", "object", "created", "model")}
        head["object"] += ".chunk"
        usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}

        def chunk(delta: dict[str, Any], **fields: Any) -> Event:
            choices = [{"index": 0, "delta": delta, "finish_reason": None, **fields}]
            return None, {**head, "choices": choices, **usage}

        extras = {
            name: value for name, value in message.items() if name not in ("role", "content", "tool_calls")
        }
        yield chunk({"role": "assistant", "content": "", **extras})
        content = {"content": message["content"]} if message["content"] else {}
        token_ids = {"token_ids": choice["token_ids"]} if asked.return_token_ids else {}
        yield chunk(content, logprobs=choice["logprobs"], **token_ids)
        for index, call in enumerate(message.get("tool_calls") or ()):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, finish_reason=choice["finish_reason"])
        if asked.include_usage:
            yield None, {**head, "choices": [], "usage": reply["usage"]}
        yield None, "[DONE]"


def plain_messages(messages: Any) -> tuple[Message, ...]:
    """Copies of the messages as plain dicts, whatever SDK objects they were; unset fields are dropped.

    Raises RequestError when they are not a list of messages.
    """
    values = _list("messages", messages)
    if not values:
        raise RequestError("messages must hold at least one message, found none")
    return tuple(_plain_message(index, message) for index, message in enumerate(values))


def logprobs_object(completion: Completion) -> dict[str, Any] | None:
    """One entry per sampled token. The tokens are named by their ids, as vLLM does on request."""
    if completion.logprobs is None:
        return None
    ids = completion.completion_ids or (None,) * len(completion.logprobs)
    return {
        "content": [
            {
                "token": "" if token is None else f"token_id:{token}",
                "logprob": max(logprob, LOWEST_LOGPROB),
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in zip(ids, completion.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _plain_message(index: int, message: Any) -> Message:
    try:
        copy = plain(message)
    except TypeError as error:
        raise RequestError(f"messages[{index}]: {error}") from error
    if not isinstance(copy, dict) or not isinstance(copy.get("role"), str):
        raise RequestError(
            f"messages[{index}] must be a dict with a role and a content, found {message!r:.80}"
        )
    # SDK objects spell out fields that are not set. The model is never shown them, so that a message
    # that comes back from a client is the message that went out.
    return {name: value for name, value in copy.items() if value is not None or name == "content"}


def _checked_tool(tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, found {tool!r:.80}"
        )
    return dict(tool)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a list, found {value!r:.80}")
    return list(value)
