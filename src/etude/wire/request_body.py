"""The fields of requests that shape an answer, in any API's format: sampling, messages, output and tools."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Required, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import to_json
from typing_extensions import TypedDict

from etude.core.call import Bias, Constraint, Count, Factor, Penalty, Sampling, Share, Temperature, TopP
from etude.core.errors import RequestError
from etude.core.json_text import plain
from etude.core.message import Message, Tool
from etude.wire.dialect import ChatBody

SAMPLING_NAMES = tuple(option.name for option in fields(Sampling))

Flag: TypeAlias = Annotated[bool, Strict()]
"""A field that must be a boolean, not a number or a word that could be read as one."""
Integer: TypeAlias = Annotated[int, Strict()]
"""A field that must be an integer, not a text or a boolean."""


def _as_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    is_list = isinstance(stops, list | tuple) and len(stops) <= 128
    if not is_list or not all(stop and isinstance(stop, str) for stop in stops):
        raise ValueError(f"give one text or at most 128, none of them empty, found {value!r:.80}")
    return stops


Stops: TypeAlias = Annotated[
    tuple[str, ...], BeforeValidator(_as_stops, json_schema_input_type=str | list[str])
]
_BY_TOKEN = BeforeValidator(lambda bias: dict(bias) if isinstance(bias, tuple) else bias)
"""Converts `Sampling`'s form of `logit_bias` to the form in requests."""


class SamplingFields(BaseModel):
    """The fields of `Sampling` in the form of requests."""

    temperature: Temperature | None = Field(default=None, strict=True)
    top_p: TopP | None = Field(default=None, strict=True)
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    stop: Stops | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, strict=True)
    top_k: int | None = Field(default=None, ge=-1, strict=True)
    min_p: Share | None = Field(default=None, strict=True)
    min_tokens: Count | None = Field(default=None, strict=True)
    stop_token_ids: tuple[Annotated[Count, Strict()], ...] | None = None
    frequency_penalty: Penalty | None = Field(default=None, strict=True)
    presence_penalty: Penalty | None = Field(default=None, strict=True)
    repetition_penalty: Factor | None = Field(default=None, strict=True)
    logit_bias: Annotated[dict[Count, Bias], _BY_TOKEN] | None = None

    def given_values(self) -> dict[str, Any]:
        """Return the fields that are not None, in `Sampling`'s form."""
        values = {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            values["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        if self.top_k == -1:  # vLLM's value for "all".
            values["top_k"] = 0
        return values


_FIELDS = tuple(SamplingFields.model_fields)


def change_sampling(base: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """Return `base` with the given fields of `Sampling` changed. None leaves a field unchanged.

    Raises RequestError for an unknown name or an invalid value.
    """
    if unknown := [name for name in changes if name not in SAMPLING_NAMES]:
        raise RequestError(
            f"'{unknown[0]}' is not a sampling parameter; allowed: {', '.join(SAMPLING_NAMES)}",
            param=unknown[0],
        )
    wishes = {name: value for name, value in changes.items() if value is not None}
    if not wishes:
        return base
    constraint: Constraint | None = wishes.pop("constraint", None)
    given = validate_body(SamplingFields, wishes).given_values()
    return apply_checked(base, given if constraint is None else {**given, "constraint": constraint})


def apply_checked(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """Return `base` changed by validated fields. Raises RequestError if `min_tokens` exceeds `max_tokens`."""
    changed = replace(base, **given)
    if changed.max_tokens is not None and changed.min_tokens > changed.max_tokens:
        raise RequestError(
            f"min_tokens is {changed.min_tokens}, but max_tokens is only {changed.max_tokens}, so no answer "
            "is long enough; change one of them",
            param="min_tokens",
        )
    return changed


BOOKKEEPING = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "thread", "prediction"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"),
        "request_id",
        # OpenAI's own models were trained for it; no other model has such a setting.
        "verbosity",
    }
)
"""Parameters of OpenAI's APIs and vLLM's that do not change an answer."""


Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Allowed values by parameter."""


B = TypeVar("B", bound=BaseModel)


_TYPE_TAG = re.compile(
    r"(str|int|float|bool|constrained-\w+|(list|tuple|dict|literal|function-\w+|nullable)\[.*)$"
)
"""Names of union members, which pydantic adds to an error's location; clients know no such fields."""


class RequestBody(SamplingFields, extra="allow"):
    """The body of a request, which is honoured completely or refused.

    No parameter that would change the answer is ignored.
    """

    model: str | None = None
    stream: Flag | None = None

    free: ClassVar[Collection[str]] = BOOKKEEPING
    """Further parameters that do not change an answer."""
    neutral: ClassVar[Neutral] = {"service_tier": ("auto", "default", "flex"), "priority": (0,)}
    """Parameters that cannot be honoured, and their values that change nothing."""

    @model_validator(mode="after")
    def _require_known_parameters(self) -> Self:
        """Raise RequestError, which pydantic passes on, because it names the parameter."""
        for name, value in (self.model_extra or {}).items():
            if name in self.free or value is None:
                continue
            if name not in self.neutral:
                raise RequestError(f"parameter '{name}' is not supported here; leave it out", param=name)
            if value not in self.neutral[name]:
                raise RequestError(
                    f"parameter '{name}' can only be {self.neutral[name][0]!r} here, found {value!r:.80}",
                    param=name,
                )
        return self

    def request(self, **fields: Any) -> ChatBody:
        """Return the request, for any API; `fields` come from the body's own API."""
        known: dict[str, Any] = {"model": self.model or "", "messages": (), "sampling": self.given_values()}
        return ChatBody(stream=bool(self.stream), **known | fields)


def validate_body(kind: type[B], body: Any, **defaults: Any) -> B:
    """Validate a request's body. Raises RequestError that lists up to five problems."""
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    try:
        return kind.model_validate(defaults | body)
    except ValidationError as error:
        message, param = describe_problems(error.errors(include_url=False))
        raise RequestError(message, param=param) from error


def describe_problems(errors: Iterable[Any]) -> tuple[str, str | None]:
    """Return pydantic's errors as a sentence, and the first wrong field, like `messages[0].role`."""
    problems, first = [], None
    errors = list(errors)
    places = {error["loc"][:depth] for error in errors for depth in range(len(error["loc"]))}
    for error in errors:
        if error["type"] == "too_short" and error["loc"] in places:
            continue  # pydantic does not count the items that have errors of their own.
        field = field_path(error["loc"])
        first = first or field or None
        if error["type"] == "json_invalid":
            return f"this is not JSON: {error.get('ctx', {}).get('error', '')}".rstrip(": "), None
        text, found = error["msg"].removeprefix("Value error, "), error["input"]
        if error["type"] != "value_error" and isinstance(found, str | int | float):
            text += f", found {found!r:.80}"
        problems.append(f"{field}: {text}" if field else text)
    return "; ".join(dict.fromkeys(problems[:5])), first


def field_path(location: Iterable[Any]) -> str:
    """Return the place of pydantic's error as a path like `messages[0].role`."""
    path = ""
    for part in map(str, location):
        if part not in ("body", "query", "path", "[key]") and not _TYPE_TAG.match(part):
            path += f"[{part}]" if part.isdecimal() else f".{part}" if path else part
    return path


Wish: TypeAlias = str | dict[str, Any]
"""A parameter that is a word, or an object with a `type`."""

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""The levels of reasoning effort in all APIs."""

_LABELS = {"name", "description", "strict"}
"""Fields of a schema that change nothing: it is enforced whether it is `strict` or not."""

FORM_FIELDS = ("response_format", "structured_outputs")
"""Request fields that constrain the answer, OpenAI's and vLLM's."""


def _read_format(value: Any) -> Constraint | None:
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if part is not None}
    match value:
        case None:
            return None
        case {"type": "text"} if len(value) == 1:
            return None
        case {"type": "json_object"} if len(value) == 1:
            return Constraint("json_object")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **labels}}:
            if len(value) == 2 and labels.keys() <= _LABELS:
                return _schema_constraint(schema)
        case {"type": "json_schema", "schema": dict(schema), **labels} if labels.keys() <= _LABELS:
            return _schema_constraint(schema)
    raise ValueError(
        "give the type text, json_object, or json_schema with a `schema` and at most name, "
        f"description and strict beside it, found {value!r:.80}"
    )


def _read_structured(value: Any) -> Constraint | None:
    given = value if isinstance(value, dict) else {"": value}
    asked = {name: form for name, form in given.items() if form is not None and form is not False}
    match list(asked.items()):
        case []:
            return None
        case [("json_object", True)]:
            return Constraint("json_object")
        case [("json", dict(schema))]:
            return _schema_constraint(schema)
        case [("choice", list(choices))] if choices and all(isinstance(choice, str) for choice in choices):
            return Constraint("choice", json.dumps(choices))
        case [("json", str(text))] if text:
            return Constraint("json_schema", text)
        case [(("regex" | "grammar") as kind, str(text))] if text:
            return Constraint(kind, text)
    raise ValueError(
        "give one of json (a schema), regex, choice (a list of texts), grammar, and json_object: true, "
        f"found {value!r:.80}"
    )


def _schema_constraint(schema: dict[str, Any]) -> Constraint:
    try:
        # The order is kept, because an answer's fields follow the schema's order.
        return Constraint("json_schema", json.dumps(schema, allow_nan=False))
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    except ValueError as error:
        raise ValueError("the schema has a number beyond ±1.8e308") from error


_OBJECT: Any = dict[str, Any] | None
Format: TypeAlias = Annotated[Constraint | None, PlainValidator(_read_format, json_schema_input_type=_OBJECT)]
"""The field of an API with the format of an answer. A schema is enforced whether it is `strict` or not."""


class FormFields(BaseModel):
    """The fields that give an answer a form."""

    response_format: Format = Field(
        default=None, description="`text`, `json_object`, or `json_schema`, which is enforced."
    )
    structured_outputs: Annotated[
        Constraint | None, PlainValidator(_read_structured, json_schema_input_type=_OBJECT)
    ] = Field(default=None, description="vLLM: one of `json`, `regex`, `choice`, `grammar`, `json_object`.")

    def constraint(self) -> dict[str, Constraint]:
        """Return the answer's form as a sampling parameter. Raises RequestError for two forms."""
        if self.response_format and self.structured_outputs:
            raise RequestError(
                "an answer has one form; give response_format or structured_outputs", param="response_format"
            )
        form = self.response_format or self.structured_outputs
        return {"constraint": form} if form else {}


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
