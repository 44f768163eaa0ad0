"""Tools that agents call, whatever they are made of: an MCP server, Python functions, a component."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from etude.core.message import Tool


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool, as the model reads it."""

    text: str
    is_error: bool = False
    """Whether the tool says that it could not do what it was asked for."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One call of a tool within an episode."""

    source: str
    """The set that the tool belongs to: an entry of `tools`."""
    name: str
    arguments: dict[str, Any] | None
    """None when the model did not write a JSON object."""
    result: str
    """The text that the model was given; of a call that failed, why."""
    outcome: str = "ok"
    """`ok`; `error` where the tool said so; `refused` where it was not asked: for arguments that are no JSON
    object, or beyond the limit of calls; `failed` where there was no answer."""
    seconds: float = 0.0
    began: float = field(default=0.0, compare=False)
    """When it was asked, in Unix seconds; 0 where that is not known."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds on one set of tools within one episode."""

    max_calls: int = 100
    max_characters: int = 20_000
    """Of one result; the rest is cut off, and the model is told so."""
    call_timeout: float = 30.0
    """Seconds that one call may take."""


class ToolSession(Protocol):
    """Tools that are open for one episode."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools in OpenAI's format, no two of one name."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call one of the tools. Raises ToolError when there is no answer to be had."""

    async def log(self) -> str:
        """The end of what the tools' server has logged since the session began; empty where it has no log."""


class ToolSource(Protocol):
    """Opens tools for episodes. The object that a component of the kind `tools` yields."""

    @property
    def forgets(self) -> bool:
        """Whether a session knows nothing of calls that were made in one before it.

        Then an episode that is resumed makes its recorded calls again before the first new one.
        """

    def open(self) -> AbstractAsyncContextManager[ToolSession]:
        """The tools for one episode. Raises ToolError when they cannot be opened."""


@dataclass(frozen=True)
class ToolSet:
    """An entry of `tools`: where they come from, which of them are offered, and their bounds."""

    name: str
    source: ToolSource
    limits: ToolLimits = field(default_factory=ToolLimits)
    only: tuple[str, ...] | None = None
    """The tools that are offered; None for all."""
    prefix: str = ""
    """Put before the name of each tool."""
    path: str = ""
    """Where the config says this, such as `tools.search`; empty for tools of a program."""
