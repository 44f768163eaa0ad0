"""Tools of the Responses API: functions, alone or in namespaces, as Codex offers its own.

A chat has no namespaces. A function of one is offered as `namespace__function`, and a call of it has both
names again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from etude.core.errors import RequestError
from etude.core.message import Tool
from etude.wire.sampling import Flag

_KINDS = ("function", "namespace")


class FunctionTool(BaseModel):
    """A function that the agent runs itself, is always shown, and is called by the model alone."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def as_chat(self, namespace: str | None = None) -> Iterator[Tool]:
        """The tool as chat completions have it."""
        named = {"name": chat_name(self.name, namespace)}
        shown = {"name", "description", "parameters", "strict"}
        function = self.model_dump(include=shown, exclude_none=True) | named
        yield {"type": "function", "function": function}


class Namespace(BaseModel):
    """Functions under one name."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionTool]

    def as_chat(self) -> Iterator[Tool]:
        """Its functions, each by both names."""
        for tool in self.tools:
            yield from tool.as_chat(self.name)


def _known(value: Any) -> Any:
    """Raises RequestError for a tool that the agent does not run: an API of OpenAI's runs it."""
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
    list[Annotated[FunctionTool | Namespace, Field(discriminator="type")]], BeforeValidator(_known)
]


def chat_name(name: str, namespace: str | None) -> str:
    """The name of a function in a chat."""
    return f"{namespace}__{name}" if namespace else name


def names_of_calls(tools: Any) -> Mapping[str, dict[str, str]]:
    """The fields by which a call names each function of a namespace in `tools`, by its name in a chat."""
    return {
        chat_name(function["name"], tool["name"]): {"name": function["name"], "namespace": tool["name"]}
        for tool in tools or ()
        if tool["type"] == "namespace"
        for function in tool["tools"]
    }
