"""The tools of an MCP server as a run has them: a session for each episode, or one for all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.message import Tool
from etude.core.tools import ToolResult
from etude.integrations.mcp.config import McpToolsConfig
from etude.integrations.mcp.connection import Connection

_SECONDS = 10.0
"""How long the end of a run waits for servers to end; they are killed before that."""


@dataclass(frozen=True)
class McpSession:
    """The tools of a connection, as one episode has them."""

    connection: Connection
    begin: int
    """Where the server's log was when the episode began."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools in OpenAI's format."""
        return self.connection.tools

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Raises ToolError when there is no answer."""
        return await self.connection.call(name, arguments)

    async def log(self) -> str:
        """The last lines that the server has logged since the episode began."""
        return self.connection.log_since(self.begin)


class McpTools:
    """The tools of one server. `scope` says whether episodes share it."""

    def __init__(self, config: McpToolsConfig, path: str, folder: Path) -> None:
        """`path` is where the config stands, such as `tools.search`; the server runs in the `folder`."""
        self._config, self._path, self._folder = config, path, folder
        self._connections: set[Connection] = set()
        self._shared: Connection | None = None
        self._starting = asyncio.Lock()

    @property
    def forgets(self) -> bool:
        """A server of an episode's own is another one after a crash."""
        return self._config.scope == "episode"

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[McpSession]:
        """A session. Raises ToolError when the server cannot be started or does not list its tools."""
        connection = await (self._connect() if self.forgets else self._share())
        try:
            yield McpSession(connection, connection.log_size if not self.forgets else 0)
        finally:
            if self.forgets:
                connection.close()

    async def close(self) -> None:
        """Close all connections, and wait for their servers to end."""
        connections = tuple(self._connections)
        for connection in connections:
            connection.close()
        waiting = [asyncio.ensure_future(connection.closed()) for connection in connections]
        if waiting:
            await asyncio.wait(waiting, timeout=_SECONDS)

    async def _share(self) -> Connection:
        async with self._starting:
            if self._shared is None or not self._shared.is_usable:
                self._shared = await self._connect()
            return self._shared

    async def _connect(self) -> Connection:
        connection = Connection(self._config, self._path, self._folder)
        self._connections.add(connection)
        connection.on_closed(self._connections.discard)
        try:
            await connection.start()
        except BaseException:
            connection.close()
            raise
        return connection
