"""Tools as they are described to a model, including Python functions, and the model's reply."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, validate_call
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from etude.core.call import Call
from etude.core.errors import RequestError
from etude.core.json_text import plain
from etude.core.message import Message, Tool, tool_arguments
from etude.wire.request_body import check_conversation


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants to call."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """The arguments by name; None if the model did not write a JSON object."""
    raw_arguments: str
    """The arguments exactly as the model wrote them."""

    def result(self, content: Any) -> Message:
        """Return the tool message with `content` for the model. Anything but text is written as JSON."""
        text = content if isinstance(content, str) else json.dumps(plain(content), ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": text}


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer."""

    text: str
    """The message's content; empty if there is none."""
    thinking: str
    """The model's thinking before its answer, which is not part of the text; empty if there is none."""
    message: Message
    """The message in OpenAI's format. Append it to the conversation to continue."""
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    logprobs: tuple[float, ...] | None
    """The natural-log probability of each sampled token, if the engine returns it."""
    token_ids: tuple[int, ...] | None
    """The sampled token ids, if the engine returns them."""


def make_reply(call: Call) -> Reply:
    """Return the answer of a finished call. Its message is a copy, so the record cannot be changed."""
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
    function = wire["function"]
    try:
        arguments = tool_arguments(function)
    except RequestError:
        arguments = None
    return ToolCall(wire.get("id", ""), function["name"], arguments, function["arguments"])


def as_response_format(response_format: Any) -> Any:
    """Return a pydantic model as OpenAI's `response_format`, and anything else unchanged."""
    if not (isinstance(response_format, type) and issubclass(response_format, BaseModel)):
        return response_format
    return {"type": "json_schema", "json_schema": {"schema": response_format.model_json_schema()}}


_HEADING = re.compile(
    r"^((?:keyword |other )?(?:args|arguments|params|parameters)):[ \t]*\n+(?=[ \t]+\S)", re.M | re.I
)
"""griffe recognises this heading only after a blank line, and only without one below it."""


class PythonFunction:
    """A function or method that a model may call.

    Pydantic's schema of its signature describes it, with the texts of `Field` and the docstring.
    The same schema checks a call's arguments.
    """

    def __init__(self, fn: Any) -> None:
        """Describe `fn`. Raises RequestError if it is not a function, or an annotation has no JSON schema."""
        if not inspect.isroutine(fn):
            raise RequestError(f"a tool must be a dict or a function, found {fn!r:.80}")
        self.name = fn.__name__
        try:
            if "self" in inspect.signature(fn).parameters:
                raise TypeError("it is a method without its object; pass a bound method")
            call: Any = validate_call(fn)
            adapter: TypeAdapter[Any] = TypeAdapter(call)
            schema = adapter.json_schema(schema_generator=_Schema)
        except (PydanticUserError, NameError, AttributeError, TypeError, ValueError, SyntaxError) as error:
            raise RequestError(
                f"function '{self.name}' cannot be described as a tool: {error}; annotate its arguments with "
                f"types that JSON has"
            ) from error
        self.call: Callable[..., Any] = call
        """Calls the function. Raises pydantic's ValidationError for arguments that do not fit."""
        text, said = _read_docstring(inspect.getdoc(fn) or "")
        properties, others = schema.setdefault("properties", {}), schema.pop("additionalProperties", False)
        for name, described in properties.items():
            if "description" not in described and name in said:
                described["description"] = said[name]
        if not isinstance(others, bool):  # By default others are neither mentioned nor ruled out.
            schema["additionalProperties"] = others
        description = {"description": text} if text else {}
        self.tool: Tool = {
            "type": "function",
            "function": {"name": self.name, "parameters": schema, **description},
        }


class _Schema(GenerateJsonSchema):
    """A schema generator without titles, which only cost tokens, and without defaults that JSON lacks."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False."""
        return False


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring of any style into its text and its argument descriptions, each on one line.

    Sections on return values and errors are left out.
    """
    from griffe import Docstring, parse_auto
    from griffe import DocstringSectionKind as Kind

    spaced = Docstring(_HEADING.sub(r"\n\1:\n", docstring))
    pieces, descriptions = [], dict[str, str]()
    quietly: Any = {style: {"warnings": False} for style in ("google", "numpy", "sphinx")}
    for section in parse_auto(spaced, method="max_sections", default="google", per_style_options=quietly):
        match section.kind:
            case Kind.parameters | Kind.other_parameters:
                for each in section.value:
                    descriptions.setdefault(each.name.strip("*`- "), " ".join(each.description.split()))
            case Kind.text:
                pieces.append(section.value)
            case Kind.admonition:
                pieces.append(f"{section.title}: {section.value.contents}")
            case Kind.examples:
                pieces += ["Examples:", *(example for _, example in section.value)]
    return " ".join(" ".join(pieces).split()), descriptions


def describe_tools(tools: Sequence[Tool | Callable[..., Any]] | None) -> tuple[Tool, ...]:
    """Return OpenAI's description of each tool. Dicts stay unchanged; functions are described.

    Raises RequestError for anything else, and for a function that cannot be described.
    """
    described = tuple(tool if isinstance(tool, dict) else _described(tool).tool for tool in tools or ())
    check_conversation((), described)
    return described


_described = functools.lru_cache(maxsize=256)(PythonFunction)
