"""Tools as a model is told of them, and its reply, which may call some."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from etude.core.call import Call
from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.message import Message, Tool
from etude.rollout.python_function import PythonFunction
from etude.store.plain import plain


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants to be called."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """The arguments by name; None when the model did not write a JSON object."""
    raw_arguments: str
    """The arguments exactly as the model wrote them."""

    def result(self, content: Any) -> Message:
        """The tool message that gives `content` back to the model; what is not text is written as JSON."""
        text = content if isinstance(content, str) else json.dumps(plain(content), ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": text}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of a model."""

    text: str
    """The content of the message; empty when there is none."""
    thinking: str
    """The model's thinking before it answered; no part of the text. Empty when there is none."""
    message: Message
    """The message in OpenAI's format: append it to the conversation to go on."""
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    logprobs: tuple[float, ...] | None
    """Natural-log probability of each sampled token, where the engine tells."""
    token_ids: tuple[int, ...] | None
    """The sampled token ids, where the engine tells."""


def reply_of(call: Call) -> Reply:
    """The answer of a finished call. The message is a copy: the record stays what it is."""
    completion = call.completion
    assert completion is not None, "the call has no answer"
    message = plain(completion.message)
    content = message.get("content")
    return Reply(
        text=content if isinstance(content, str) else "",
        thinking=completion.thinking,
        message=message,
        tool_calls=tuple(map(_tool_call, message.get("tool_calls") or ())),
        finish_reason=completion.finish_reason,
        logprobs=completion.logprobs,
        token_ids=completion.completion_ids,
    )


def _tool_call(wire: Any) -> ToolCall:
    raw = wire["function"]["arguments"]
    try:
        arguments = read_json(raw, unique_keys=False)
    except ValueError:
        arguments = None
    return ToolCall(
        id=wire.get("id", ""),
        name=wire["function"]["name"],
        arguments=arguments if isinstance(arguments, dict) else None,
        raw_arguments=raw,
    )


def schema_of(response_format: Any) -> Any:
    """A pydantic model as OpenAI's `response_format`; anything else as it is."""
    if not (isinstance(response_format, type) and issubclass(response_format, BaseModel)):
        return response_format
    return {"type": "json_schema", "json_schema": {"schema": response_format.model_json_schema()}}


def describe_tools(tools: Sequence[Tool | Callable[..., Any]] | None) -> tuple[Tool, ...]:
    """OpenAI's description of each tool: dicts are taken as they are, functions are described.

    Raises RequestError for what is neither, and for a function that cannot be described.
    """
    for tool in tools or ():
        if isinstance(tool, dict) and not (
            isinstance(tool.get("function"), dict) and tool["function"].get("name")
        ):
            raise RequestError(
                f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, found {tool!r:.80}"
            )
    return tuple(tool if isinstance(tool, dict) else describe_function(tool) for tool in tools or ())


def describe_function(fn: Callable[..., Any]) -> Tool:
    """OpenAI's description of a Python function, made of its signature and docstring.

    Raises RequestError when an annotation has no JSON schema.
    """
    # Some callable objects cannot be a key.
    return (_described if isinstance(fn, Hashable) else PythonFunction)(fn).tool


_described = functools.lru_cache(maxsize=256)(PythonFunction)
