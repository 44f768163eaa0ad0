"""How an MCP server is reached, in a config."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from etude.config.component import ToolsConfig
from etude.core.errors import RequestError
from etude.rollout.agent import AgentConfig


class McpToolsConfig(ToolsConfig, name="mcp"):
    """Tools of an MCP server: a command that is started, or an address. Needs the extra `mcp`."""

    command: str | None = None
    """The program that serves over its standard streams; `python` is the one that Etude runs in."""
    args: list[str] = Field(default_factory=list)
    """Its arguments."""
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Variables of its environment, which otherwise has PATH, HOME and little more: `{KEY: "${KEY}"}`."""
    cwd: Path | None = None
    """The folder that it runs in; by default that of the config file."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """The address of a server that speaks streamable HTTP, in place of a command."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Headers of every request to it: `{Authorization: "Bearer ${TOKEN}"}`."""
    scope: Literal["episode", "shared"] = "episode"
    """`episode`: each episode has a server, or a session with it, of its own. `shared`: all have one server,
    which is begun anew when it has died, and should remember nothing."""
    start_timeout: float = Field(default=30.0, gt=0)
    """Seconds until the server must have started and listed its tools."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either a 'command' to start, or the 'url' of a server")
        if self.url is not None and (self.args or self.env or self.cwd):
            raise ValueError("'args', 'env' and 'cwd' go with a 'command', not with a 'url'")
        if self.command is not None and self.headers:
            raise ValueError("'headers' go with a 'url', not with a 'command'")
        return self

    def program(self) -> str:
        """The path of the command. Raises RequestError when there is none."""
        assert self.command is not None
        if self.command in ("python", "python3"):
            return sys.executable
        path = shutil.which(self.command, path=None)
        if path is None and self.cwd is not None:
            path = shutil.which(str(self.cwd / self.command))
        if path is None:
            raise RequestError(f"there is no program '{self.command}'; install it, or write where it is")
        return path

    @property
    def address(self) -> str:
        """The server in words, without secrets."""
        return str(self.url or " ".join([str(self.command), *self.args]))


class McpAgentConfig(AgentConfig, McpToolsConfig, name="mcp"):
    """An agent whose tools are those of an MCP server. Needs the extra `mcp`."""
