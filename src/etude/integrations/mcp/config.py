"""The config of an MCP server: its command or address."""

import shutil
import sys
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from etude.config.component import ToolsConfig
from etude.core.errors import RequestError
from etude.rollout.workflow import AgentConfig


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
