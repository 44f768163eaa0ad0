"""Tools as a model is told of them, and its reply, which may call some."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from etude.core.call import Call
from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.message import Message, Tool
from etude.store.plain import plain

_ARGUMENT = re.compile(r"^\s+\**(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


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
        if isinstance(tool, dict):
            if not isinstance(tool.get("function"), dict) or not tool["function"].get("name"):
                raise RequestError(
                    f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, found {tool!r:.80}"
                )
        elif not callable(tool):
            raise RequestError(f"a tool must be a dict or a function, found {tool!r:.80}")
    return tuple(tool if isinstance(tool, dict) else describe_function(tool) for tool in tools or ())


@functools.lru_cache(maxsize=256)
def describe_function(fn: Callable[..., Any]) -> Tool:
    """OpenAI's description of a Python function: name, docstring, and JSON schema of its arguments.

    Text under `Args:` in the docstring describes the arguments. Raises RequestError when an
    annotation has no JSON schema.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    summary, descriptions = _read_docstring(inspect.getdoc(fn) or "")
    try:
        parameters = inspect.signature(fn, eval_str=True).parameters.values()
        fields: dict[str, Any] = {
            parameter.name: (
                Any if parameter.annotation is parameter.empty else parameter.annotation,
                Field(
                    default=... if parameter.default is parameter.empty else parameter.default,
                    description=descriptions.get(parameter.name),
                ),
            )
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        schema = create_model(name, **fields).model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError, ValueError) as error:
        raise RequestError(
            f"function '{name}' cannot be described as a tool: {error}; annotate its arguments with "
            f"types that JSON has"
        ) from error
    described = {"name": name, "parameters": _without_titles(schema)}
    if summary:
        described["description"] = summary
    return {"type": "function", "function": described}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The summary before `Args:`, and the descriptions of the arguments."""
    before, _, after = text.partition("Args:")
    summary = " ".join(before.split())
    descriptions: dict[str, str] = {}
    for line in after.splitlines():
        match = _ARGUMENT.match(line)
        if match:
            descriptions[match[1]] = match[2].strip()
        elif line.strip() and not line.startswith((" ", "\t")):
            break  # The next section.
    return summary, descriptions


def _without_titles(schema: Any) -> Any:
    """Pydantic names every property twice; the second name only costs tokens."""
    if isinstance(schema, dict):
        return {
            key: {name: _without_titles(inner) for name, inner in value.items()}
            if key in ("properties", "$defs")
            else _without_titles(value)
            for key, value in schema.items()
            if key != "title"
        }
    if isinstance(schema, list):
        return [_without_titles(inner) for inner in schema]
    return schema
