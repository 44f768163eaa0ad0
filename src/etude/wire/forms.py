"""The parts of a request that shape its answer, in any API's format: output, tools and thinking.

Tools of the Responses API may be in namespaces; Codex offers its tools so. A chat has no namespaces: a
function in one is offered as `namespace__function`, and calls of it get both names back.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field

from etude.core.call import Constraint
from etude.core.errors import RequestError
from etude.core.message import Tool
from etude.wire.sampling import Flag

Wish: TypeAlias = str | dict[str, Any]
"""A parameter that is a word, or an object with a `type`."""

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""The levels of reasoning effort in all APIs."""

_FORMAT_FIELDS = {"type", "json_schema", "schema", "name", "description", "strict"}

FORM_FIELDS = ("response_format", "structured_outputs")
"""Request fields that constrain the answer, OpenAI's and vLLM's."""


def read_format(value: Wish | None, param: str) -> Constraint | None:
    """Return the constraint of a `response_format`, or None if any text is allowed.

    A schema is enforced whether it is `strict` or not. Raises RequestError for other formats.
    """
    match _known_fields(value, param):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Constraint("json_object")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            _known_fields(value["json_schema"], f"{param}.json_schema")  # type: ignore[index]
            return _schema_constraint(schema, param)
        case {"type": "json_schema", "schema": dict(schema)}:
            return _schema_constraint(schema, param)
    raise RequestError(
        f"{param} must be of the type text, json_object, or json_schema with a `schema`, found {value!r:.80}",
        param=param,
    )


def _known_fields(value: Any, param: str) -> Any:
    """Return a format without unset fields. Raises RequestError for a field that its type does not have.

    A schema's name and description are only labels, and it is enforced whether it is `strict` or not.
    """
    if not isinstance(value, dict):
        return value
    given = {name: part for name, part in value.items() if part is not None}
    is_bare = given.get("type") in ("text", "json_object")
    if unknown := sorted(given.keys() - ({"type"} if is_bare else _FORMAT_FIELDS)):
        raise RequestError(f"{param}.{unknown[0]} is not supported here; leave it out", param=param)
    return given


def read_structured(value: Mapping[str, Any] | None) -> Constraint | None:
    """Return the constraint of vLLM's `structured_outputs`. Raises RequestError unless it has one kind."""
    param = "structured_outputs"
    asked = {name: form for name, form in (value or {}).items() if form is not None and form is not False}
    match list(asked.items()):
        case []:
            return None
        case [("json_object", True)]:
            return Constraint("json_object")
        case [("json", dict(schema))]:
            return _schema_constraint(schema, param)
        case [("choice", list(choices))] if choices and all(isinstance(choice, str) for choice in choices):
            return Constraint("choice", json.dumps(choices))
        case [("json", str(text))] if text:
            return Constraint("json_schema", text)
        case [(("regex" | "grammar") as kind, str(text))] if text:
            return Constraint(kind, text)
    raise RequestError(
        f"{param} must have one of json (a schema), regex, choice (a list of texts), grammar, and "
        f"json_object: true, found {value!r:.80}",
        param=param,
    )


def _schema_constraint(schema: dict[str, Any], param: str) -> Constraint:
    try:
        # The order is kept, because an answer's fields follow the schema's order.
        return Constraint("json_schema", json.dumps(schema, allow_nan=False))
    except RecursionError as error:
        raise RequestError(f"{param}: the schema is nested too deeply", param=param) from error
    except ValueError as error:
        raise RequestError(f"{param}: the schema has a number beyond ±1.8e308", param=param) from error


def only_one(constraints: Sequence[Constraint | None]) -> dict[str, Constraint]:
    """Return the only set constraint as a sampling parameter. Raises RequestError for two of them."""
    asked = [constraint for constraint in constraints if constraint is not None]
    if len(asked) > 1:
        raise RequestError(
            "an answer has one form; give response_format or structured_outputs", param="response_format"
        )
    return {"constraint": asked[0]} if asked else {}


def choose_tools(tools: tuple[Tool, ...], value: Wish | None) -> tuple[tuple[Tool, ...], str]:
    """Return a request's tools, and its `tool_choice` (OpenAI's or Anthropic's) as in `ChatRequest`.

    Tools that are not allowed are left out, so the model does not know them. Raises RequestError for an
    invalid choice, and for a choice of tools that the request does not have.
    """
    if value is None:
        return tools, "auto"
    choice, names = _read_choice(value)
    offered = [tool["function"]["name"] for tool in tools]
    for name in names or ():
        if name not in offered:
            raise RequestError(f"tool_choice: there is no tool '{name}' in tools", param="tool_choice")
    if choice == "none":
        # The tools stay in the prompt, which extends an earlier one with them.
        return tools, "none" if offered else "auto"
    if choice == "required" and not offered:
        raise RequestError("tool_choice: there are no tools to call", param="tool_choice")
    if choice == "function":
        return tools, f"function:{(names or [''])[0]}"
    return tuple(tool for tool in tools if names is None or tool["function"]["name"] in names), choice


def _read_choice(value: Wish) -> tuple[str, list[str] | None]:
    """Return `auto`, `none`, `required` or `function`, and the names of the allowed tools; None for all."""
    match value:
        case "auto" | "none" | "required":
            return value, None
        case {"type": ("auto" | "none") as word}:
            return word, None
        case {"type": "any"}:
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            return "function", [name]
        case {"type": "function" | "tool", "name": str(name)}:
            return "function", [name]
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _read_choice({**allowed, "type": "allowed_tools"})
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": [*tools]}:
            named = [_read_choice(tool)[1] for tool in tools]
            if tools and all(named):
                return mode, [name for names in named for name in names or ()]
    raise RequestError(
        "tool_choice must be auto, none, required, a function by its name, or allowed_tools, found "
        f"{value!r:.80}",
        param="tool_choice",
    )


_KINDS = ("function", "namespace")


class FunctionTool(BaseModel, extra="forbid"):
    """A function that the agent runs, that is always visible, and that only the model calls."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def as_chat(self, namespace: str | None = None) -> Iterator[Tool]:
        """Yield the tool in the format of chat completions."""
        named = {"name": chat_name(self.name, namespace)}
        shown = {"name", "description", "parameters", "strict"}
        function = self.model_dump(include=shown, exclude_none=True) | named
        yield {"type": "function", "function": function}


class Namespace(BaseModel, extra="forbid"):
    """Functions under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionTool]

    def as_chat(self) -> Iterator[Tool]:
        """Yield its functions, named by namespace and function."""
        for tool in self.tools:
            yield from tool.as_chat(self.name)


def _check(value: Any) -> Any:
    """Raise RequestError for a tool that only OpenAI's own API can run."""
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in _KINDS:
            raise RequestError(
                f"tools[{index}].type: a tool of the type '{kind}' is not supported here, where tools are "
                "functions that the agent runs; leave it out",
                param=f"tools[{index}].type",
            )
    return value


ResponseTools: TypeAlias = Annotated[
    list[Annotated[FunctionTool | Namespace, Field(discriminator="type")]], BeforeValidator(_check)
]


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function in a chat."""
    return f"{namespace}__{name}" if namespace else name


def names_of_calls(tools: Any) -> Mapping[str, dict[str, str]]:
    """Map the chat name of each function in a namespace to the fields that name it in a call."""
    return {
        chat_name(function["name"], tool["name"]): {"name": function["name"], "namespace": tool["name"]}
        for tool in tools or ()
        if tool["type"] == "namespace"
        for function in tool["tools"]
    }
