"""MCP's components: the tools of a server, and an agent with them. The client is loaded when needed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from etude.config.registry import register_tools, register_workflow
from etude.core.errors import MissingExtraError
from etude.integrations.mcp.config import McpAgentConfig, McpToolsConfig
from etude.rollout.workflow import Workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.mcp.source import McpTools


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
