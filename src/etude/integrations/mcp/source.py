"""The tools of an MCP server in a run: a session for each episode, or one for all."""

import asyncio
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from etude.core.episode import ToolResult
from etude.core.errors import ToolError, first_error
from etude.core.message import Tool
from etude.integrations.mcp.config import McpToolsConfig

_AT_FAULT = {types.INVALID_PARAMS, types.INVALID_REQUEST, types.METHOD_NOT_FOUND}
START_SECONDS = 60.0
"""The time limit for a server to start and list its tools."""
_LOG_LINES, _LOG_BYTES = 12, 2**14
"""The maximum length of the log's end that an error shows."""

# A server that breaks the protocol should not print tracebacks at the user's terminal.
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)


class Connection:
    """One session with a server. Any task can call `start`, `call` and `close`."""

    def __init__(self, config: McpToolsConfig, path: str, folder: Path) -> None:
        """Connect. `path` is the place of the config, such as `tools.search`. The server runs in `folder`."""
        self._config, self._path, self._folder = config, path, folder
        self.tools: tuple[Tool, ...] = ()
        """The tools in OpenAI's format."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by the task
        """The server's standard error and its log messages."""
        self._last_lines: list[str] = []
        """The end of the log, after the connection was closed."""
        self.is_usable = False
        """False before the start, and after the connection was closed or lost."""
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(), name=f"mcp {path}")
        """The task that holds the connection open until it ends."""

    async def start(self) -> None:
        """Wait until the server has listed its tools. Raises ToolError."""
        try:
            async with asyncio.timeout(START_SECONDS) as clock:
                client = await asyncio.shield(self._ready)
                page = await client.list_tools()
                tools = [*page.tools]
                while page.next_cursor is not None:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
                self.tools = tuple({tool.name: _to_openai_tool(tool) for tool in tools}.values())
        except Exception as error:  # anything that the server sends or its program raises is the reason
            if isinstance(error, TimeoutError) and clock.expired():
                self.task.cancel()
                raise self._error(f"did not start and list its tools within {START_SECONDS:g} s") from error
            self.close()
            raise self._error(f"cannot be used: {_cause(error)}") from error
        self.is_usable = True

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool, and return its result or the caller's error. Raises ToolError if there is none."""
        client = self._ready.result()
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code in _AT_FAULT:
                return ToolResult(f"error: {error.message}", is_error=True)
            if error.code == types.CONNECTION_CLOSED:
                self.close()
                raise self._error(f"died while it had to call '{name}'") from error
            raise self._error(f"answered '{name}' with the error {error.code}: {error.message}") from error
        except (ValidationError, RuntimeError, httpx2.HTTPError, OSError) as error:
            raise self._error(f"gave '{name}' no valid answer: {_cause(error)}") from error
        parts = []
        for block in result.content:
            if isinstance(block, types.TextContent):
                parts.append(block.text)
            elif isinstance(resource := getattr(block, "resource", None), types.TextResourceContents):
                parts.append(resource.text)
            elif isinstance(block, types.ResourceLink):
                parts.append(str(block.uri))
            else:
                parts.append(f"[{getattr(block, 'mime_type', None) or block.type}]")
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        return ToolResult("\n".join(parts), result.is_error)

    def close(self) -> None:
        """Start closing the connection. A server that Etude started is killed if it does not exit."""
        self.is_usable = False
        self._closing.set()

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await stack.enter_async_context(self._transport())
                client = Client(
                    contextlib.nullcontext(transport),
                    logging_callback=self._note_log,
                    log_level="info",
                    cache=None,
                )
                await stack.enter_async_context(client)
                self._ready.set_result(client)
                await self._closing.wait()
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  raised where `_ready` is awaited
            if not self._ready.done():
                self._ready.set_exception(error)
                self._ready.exception()
        finally:
            self._ready.cancel()
            self.is_usable = False
            self._last_lines = self._log_end()
            self._log.close()

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        config = self._config
        if config.url is not None:
            headers = {name: value.get_secret_value() for name, value in config.headers.items()}
            # Reads have no timeout here, because calls have their own limit.
            async with (
                httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=None)) as http,
                streamable_http_client(config.url, http_client=http) as streams,
            ):
                yield streams
            return
        parameters = StdioServerParameters(
            command=config.program(self._folder),
            args=config.args,
            env={name: value.get_secret_value() for name, value in config.env.items()},
            cwd=self._folder,
        )
        async with stdio_client(parameters, errlog=self._log) as streams:
            yield streams

    def _error(self, reason: str) -> ToolError:
        """Return an error about the server, with the last lines of its log."""
        lines = "\n".join(f"  | {line}" for line in self._log_end())
        text = f"the MCP server of {self._path} ({self._config.address}) {reason}"
        return ToolError(f"{text}; its log ends with\n{lines}" if lines else text)

    def _log_end(self) -> list[str]:
        if self._log.closed:
            return self._last_lines
        descriptor = self._log.fileno()
        begin = max(0, os.fstat(descriptor).st_size - _LOG_BYTES)
        return os.pread(descriptor, _LOG_BYTES, begin).decode("utf-8", "replace").splitlines()[-_LOG_LINES:]

    async def _note_log(self, params: types.LoggingMessageNotificationParams) -> None:
        data = params.data if isinstance(params.data, str) else json.dumps(params.data, default=str)
        os.write(self._log.fileno(), f"{params.level}: {data}\n".encode())


def _to_openai_tool(tool: types.Tool) -> Tool:
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _cause(error: BaseException) -> str:
    """Return the first error that is not a group, on one line."""
    error = first_error(error)
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, MCPError | RuntimeError) else f"{type(error).__name__}: {text[:500]}"


class McpTools:
    """The tools of one server. `scope` in the config says whether episodes share it."""

    def __init__(self, config: McpToolsConfig, path: str, folder: Path) -> None:
        """Create the source. `path` is the place of the config, such as `tools.search`."""
        self._config, self._path, self._folder = config, path, folder
        self._connections: set[Connection] = set()
        self._shared: asyncio.Task[Connection] | None = None

    @property
    def forgets(self) -> bool:
        """Whether a resumed episode gets a new server, so that its recorded calls are made again."""
        return self._config.scope == "episode"

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Connection]:
        """Open a session. Raises ToolError if the server does not start or does not list its tools.

        Episodes that wait for the start of a shared server share a failure of it.
        """
        if self.forgets:
            connection = await self._connect()
            try:
                yield connection
            finally:
                connection.close()
            return
        task = self._shared
        if task is None or (task.done() and (task.exception() or not task.result().is_usable)):
            task = self._shared = asyncio.create_task(self._connect())
        yield await asyncio.shield(task)

    async def close(self) -> None:
        """Close all connections, and wait for their servers to end."""
        connections = tuple(self._connections)
        for connection in connections:
            connection.close()
        if connections:
            # The client kills the servers before this timeout.
            await asyncio.wait([connection.task for connection in connections], timeout=10.0)

    async def _connect(self) -> Connection:
        connection = Connection(self._config, self._path, self._folder)
        self._connections.add(connection)
        connection.task.add_done_callback(lambda _: self._connections.discard(connection))
        try:
            await connection.start()
        except BaseException:
            connection.close()
            raise
        return connection
