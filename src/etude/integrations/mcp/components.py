"""MCP's components: the tools of a server, and an agent with them. The client is loaded when needed."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, SecretStr, model_validator

from etude.config.component import ToolsConfig
from etude.config.registry import register_tools, register_workflow
from etude.core.errors import MissingExtraError, RequestError
from etude.rollout.workflow import AgentConfig, Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.mcp.source import McpTools


class McpToolsConfig(ToolsConfig, name="mcp"):
    """Tools of an MCP server, which has a command to start or an address. Needs the extra `mcp`."""

    command: str | None = None
    """The program that serves over its standard streams, and works in the folder of the config file. `python`
    is the Python that runs Etude."""
    args: list[str] = Field(default_factory=list)
    """The program's arguments."""
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Environment variables, such as `{KEY: "${KEY}"}`. The program gets these, PATH, HOME and few more."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """The address of a server that speaks streamable HTTP. Replaces `command`."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Headers of every request to the server, such as `{Authorization: "Bearer ${TOKEN}"}`."""
    scope: Literal["episode", "shared"] = "episode"
    """`episode`: each episode has a separate server, or a separate session with it. `shared`: all episodes
    share one server. It is restarted after a crash, and should keep no state."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either a 'command' to start, or the 'url' of a server")
        if self.url is not None and (self.args or self.env):
            raise ValueError("'args' and 'env' go with a 'command', not with a 'url'")
        if self.command is not None and self.headers:
            raise ValueError("'headers' go with a 'url', not with a 'command'")
        return self

    def program(self, folder: Path) -> str:
        """Return the path of the command, which may be in `folder`. Raises RequestError if there is none."""
        assert self.command is not None
        if self.command in ("python", "python3"):
            return sys.executable
        on_path = None if "/" in self.command else shutil.which(self.command)
        path = on_path or shutil.which(str(folder / self.command))
        if path is None:
            raise RequestError(f"there is no program '{self.command}'; install it, or write where it is")
        return path

    @property
    def address(self) -> str:
        """The server's URL or command line, without secrets."""
        return str(self.url or " ".join([str(self.command), *self.args]))


class McpAgentConfig(AgentConfig, McpToolsConfig, name="mcp"):
    """An agent with the tools of an MCP server. Needs the extra `mcp`."""


@register_tools(config_type=McpToolsConfig)
async def mcp_tools(config: McpToolsConfig, builder: Builder) -> AsyncIterator[McpTools]:
    """Open the tools. Raises RequestError for a missing program, MissingExtraError without the client."""
    names = [name for name, each in builder.config.tools.items() if each is config]
    async with _open_tools(config, f"tools.{names[0]}", builder) as tools:
        yield tools


@register_workflow(config_type=McpAgentConfig)
async def mcp_agent(config: McpAgentConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Build an agent with the tools of its server and its other tool sets. Raises as `mcp_tools` does."""
    async with _open_tools(config, "workflow", builder) as tools:
        yield config.workflow(config.tool_set("mcp", tools, "workflow"))


@contextlib.asynccontextmanager
async def _open_tools(config: McpToolsConfig, path: str, builder: Builder) -> AsyncIterator[McpTools]:
    try:
        from etude.integrations.mcp.source import McpTools
    except ImportError as error:
        raise MissingExtraError("tools of MCP servers", "mcp") from error
    file = builder.config.finetuning.run_configuration.config_file
    folder = file.parent if file else Path.cwd()
    if config.command is not None:
        config.program(folder)
    tools = McpTools(config, path, folder)
    try:
        yield tools
    finally:
        await tools.close()
