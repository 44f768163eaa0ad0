"""The components of MCP: tools of a server. The client itself is loaded when a server is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from etude.config.registry import register_tools
from etude.core.errors import MissingExtraError
from etude.integrations.mcp.config import McpToolsConfig

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.mcp.source import McpTools


@register_tools(config_type=McpToolsConfig)
async def mcp_tools(config: McpToolsConfig, builder: Builder) -> AsyncIterator[McpTools]:
    """Raises RequestError for a program that is not there, MissingExtraError without the client."""
    try:
        from etude.integrations.mcp.source import McpTools
    except ImportError as error:
        raise MissingExtraError("tools of MCP servers", "mcp") from error
    if config.command is not None:
        config.program()
    file = builder.config.finetuning.run_configuration.config_file
    names = [name for name, each in builder.config.tools.items() if each is config]
    tools = McpTools(config, names[0] if names else "mcp", file.parent if file else Path.cwd())
    try:
        yield tools
    finally:
        await tools.close()
