"""The parts of a request that shape its answer, in any API's format: messages, output and tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Required, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import to_json
from typing_extensions import TypedDict

from etude.core.call import Constraint
from etude.core.errors import RequestError
from etude.core.json_text import plain
from etude.core.message import Message, Tool
from etude.wire.sampling import Flag, validate_body

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


def choose_tool(tools: Sequence[Tool], wish: Wish | None) -> str:
    """Return a request's `tool_choice`, OpenAI's or Anthropic's, as in `ChatRequest`.

    Raises RequestError for an invalid choice, and for a choice of tools that the request does not have.
    """
    match wish:
        case None | "auto" | {"type": "auto"}:
            return "auto"
        case "none" | {"type": "none"}:
            # The tools stay in the prompt, which extends an earlier one with them.
            return "none" if tools else "auto"
        case "required" | {"type": "any"}:
            if not tools:
                raise RequestError("tool_choice: there are no tools to call", param="tool_choice")
            return "required"
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case {"type": "function" | "tool", "name": str(name)}:
            pass
        case _:
            problem = f"must be auto, none, required, or a function by its name, found {wish!r:.80}"
            raise RequestError(f"tool_choice {problem}", param="tool_choice")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(f"tool_choice: there is no tool '{name}' in tools", param="tool_choice")
    return f"function:{name}"


class _Named(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    name: Required[str]
    parameters: dict[str, Any] | None
    strict: Flag | None


class _Function(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    id: str | None
    function: Required[_Named]


def _check_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "text" and not isinstance(part.get("text"), str):
        raise ValueError("the text of a part must be a string")
    return part


class _ChatMessage(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | list[Annotated[Any, AfterValidator(_check_part)]] | None
    tool_calls: list[_Function] | None
    tool_call_id: str | None
    reasoning: str | None
    reasoning_content: str | None


class _Conversation(BaseModel):
    messages: list[_ChatMessage]
    tools: list[_Function] | None


def plain_messages(messages: Any) -> tuple[Message, ...]:
    """Copy messages to plain dicts from any SDK's objects, without unset fields.

    Raises RequestError if they are not a list of messages.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages must be a list, found {messages!r:.80}")
    if not messages:
        raise RequestError("messages must hold at least one message, found none")
    copies = []
    for index, message in enumerate(messages):
        try:
            copies.append(plain(message))
        except TypeError as error:
            raise RequestError(f"messages[{index}]: {error}") from error
    check_conversation(copies, None)
    return tuple(map(without_unset, copies))


def without_unset(message: Message) -> Message:
    """Return the message as the model sees it.

    SDK objects include unset fields. Without them, a message that a client sends back equals the one that it
    received. vLLM's field `reasoning` becomes `reasoning_content`.
    """
    if None not in message.values() and "reasoning" not in message:
        return message
    shown = {name: value for name, value in message.items() if value is not None or name == "content"}
    if "reasoning" in shown:
        shown.setdefault("reasoning_content", shown.pop("reasoning"))
    return shown


def check_conversation(messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
    """Raise RequestError for invalid messages and tools, and for results that no call asked for."""
    validate_body(_Conversation, {"messages": messages, "tools": tools})
    called: set[Any] = set()
    for index, message in enumerate(messages):
        where, problem = f"messages[{index}]", ""
        if message.get("content") is None and not (
            message["role"] == "assistant" and {"content", "tool_calls"} & message.keys()
        ):
            where += ".content"
            problem = "is missing; only an assistant's message that calls tools may leave it out"
        for name in ("function_call", "audio", "refusal"):  # No chat template writes them.
            if message.get(name):
                where += f".{name}"
                problem = "is not supported here, because the model would not see it"
        called.update(call.get("id") for call in message.get("tool_calls") or ())
        id = message.get("tool_call_id")
        if message["role"] == "tool" and id not in called - {None}:
            where += ".tool_call_id"
            problem = f"must be the id of a tool call of an earlier message, found {id!r:.80}"
        if problem:
            raise RequestError(f"{where} {problem}", param=where)
    try:
        to_json([messages, tools])
    except ValueError as error:
        raise RequestError(f"messages and tools cannot be written as JSON: {error}") from error
