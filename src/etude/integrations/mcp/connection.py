"""A connection to an MCP server, held by a task of its own, so that any task may use and close it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from etude.core.errors import ToolError
from etude.core.message import Tool
from etude.core.tools import ToolResult
from etude.integrations.mcp import guarded
from etude.integrations.mcp.config import McpToolsConfig
from etude.integrations.mcp.server_log import ServerLog

_PAGES = 100
"""Pages of a list of tools, at most: a server that never ends its list is not followed."""
_AT_FAULT = {types.INVALID_PARAMS, types.INVALID_REQUEST, types.METHOD_NOT_FOUND}
_LAST_WORDS_SECONDS = 0.5

# A breach of the protocol is an entry of the server's log, and not a traceback at the user's terminal.
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)


class Connection:
    """One session with a server. `start` it, `call` it, `close` it; each in any task."""

    def __init__(self, config: McpToolsConfig, path: str, folder: Path) -> None:
        """`path` is where the config stands, such as `tools.search`; the server runs in the `folder`."""
        self._config, self._path, self._folder = config, path, folder
        self.tools: tuple[Tool, ...] = ()
        self.log = ServerLog()
        self.is_usable = False
        """False before the start, and once the connection is lost."""
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp {path}")

    async def start(self) -> None:
        """Wait until the server has listed its tools. Raises ToolError."""
        limit = self._config.start_timeout
        try:
            async with asyncio.timeout(limit) as clock:
                client = await asyncio.shield(self._ready)
                self.tools = await self._list(client)
        except TimeoutError as error:
            if not clock.expired():
                raise
            self._task.cancel()
            reason = f"did not start and list its tools within {limit:g} s"
            raise await self._error(reason, raise_key="start_timeout") from error
        except ToolError:
            self.close()
            raise
        except Exception as error:  # whatever a server sends, or its program raises, is why there is none
            self.close()
            raise await self._error(f"cannot be used: {_cause(error)}") from error
        self.is_usable = True

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of a tool; an error of the caller's is one too. Raises ToolError when there is none."""
        client = self._ready.result()
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code in _AT_FAULT:
                return ToolResult(f"error: {error.message}", is_error=True)
            self.is_usable &= error.code != types.CONNECTION_CLOSED
            if not self.is_usable:
                raise await self._error(f"died while it had to call '{name}'") from error
            raise await self._error(
                f"answered '{name}' with the error {error.code}: {error.message}"
            ) from error
        except (ValidationError, RuntimeError, httpx2.HTTPError, OSError) as error:
            raise await self._error(f"gave '{name}' no valid answer: {_cause(error)}") from error
        return ToolResult(_text_of(result), result.is_error)

    @property
    def is_alive(self) -> bool:
        """Whether it can be used: it has started, is not lost, and its server has not ended."""
        return self.is_usable and not (self._config.command and self.log.has_ended)

    def close(self) -> None:
        """Begin to close: the server is told, and its process group killed if it does not end by itself."""
        self.is_usable = False
        self._closing.set()

    async def closed(self) -> None:
        """Wait until it is."""
        await asyncio.wait({self._task})

    def on_closed(self, listener: Callable[[Connection], object]) -> None:
        """Tell a listener when it is."""
        self._task.add_done_callback(lambda task: listener(self))

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await stack.enter_async_context(self._transport())
                client = Client(
                    contextlib.nullcontext(transport),
                    logging_callback=self._note_log,
                    message_handler=self._note_breach,
                    log_level="info",
                    cache=None,
                )
                await stack.enter_async_context(client)
                self._ready.set_result(client)
                await self._closing.wait()
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  raised to whoever waits
            if not self._ready.done():
                self._ready.set_exception(error)
                self._ready.exception()
        finally:
            self._ready.cancel()
            self.is_usable = False
            self.log.close()

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        config = self._config
        if config.url is not None:
            headers = {name: value.get_secret_value() for name, value in config.headers.items()}
            # No reading takes as long as this: calls have a limit of their own.
            async with (
                httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=None)) as http,
                streamable_http_client(config.url, http_client=http) as streams,
            ):
                yield streams
            return
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-I", "-S", str(guarded.__file__), config.program(), *config.args],
            env={name: value.get_secret_value() for name, value in config.env.items()},
            cwd=config.cwd or self._folder,
        )
        async with stdio_client(parameters, errlog=self.log.stream) as streams:
            self.log.started()
            yield streams

    async def _list(self, client: Client) -> tuple[Tool, ...]:
        """All tools. Raises ToolError for a bad schema, and two tools of one name."""
        listed: dict[str, Tool] = {}
        cursor = None
        for _ in range(_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if tool.name in listed:
                    raise await self._error(f"lists two tools of the name '{tool.name}'")
                try:
                    jsonschema.Draft202012Validator.check_schema(tool.input_schema)
                except jsonschema.SchemaError as error:
                    raise await self._error(
                        f"lists a bad schema for '{tool.name}': {error.message}"
                    ) from error
                listed[tool.name] = _described(tool)
            cursor = page.next_cursor
            if cursor is None:
                return tuple(listed.values())
        raise await self._error(f"lists its tools on more than {_PAGES} pages")

    async def _error(self, reason: str, raise_key: str = "") -> ToolError:
        """The error that a server made, with the last lines of its log."""
        if self._config.url is None and not self.is_usable:
            await self.log.end(_LAST_WORDS_SECONDS)
        remedy = f"; raise {self._path}.{raise_key} if it needs longer" if raise_key else ""
        lines = "\n".join(f"  | {line}" for line in self.log.since().splitlines()[-12:])
        text = f"the MCP server of {self._path} ({self._config.address}) {reason}{remedy}"
        return ToolError(f"{text}; its log ends with\n{lines}" if lines else text)

    async def _note_log(self, params: types.LoggingMessageNotificationParams) -> None:
        data = params.data if isinstance(params.data, str) else json.dumps(params.data, default=str)
        self.log.add(f"{params.level}: {data}")

    async def _note_breach(self, message: Any) -> None:
        if isinstance(message, Exception):
            self.log.add(f"sent what is no message of the protocol: {_cause(message)}")


def _described(tool: types.Tool) -> Tool:
    """A tool in OpenAI's format."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def _text_of(result: types.CallToolResult) -> str:
    """The text of a result. What is no text is named with its type; without any, the structured content."""
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
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _cause(error: BaseException) -> str:
    """The first error that is no group, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, MCPError | RuntimeError) else f"{type(error).__name__}: {text[:500]}"
