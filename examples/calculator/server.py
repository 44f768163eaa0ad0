"""The calculator as an MCP server over its standard streams: `python server.py`.

A server for one's own tools is shorter with `mcp.server.MCPServer`. This one describes its tool word for word
as `agent.py` does, because that is what the base model knows.
"""

import asyncio
from typing import Any

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

from etude.rollout.tools import describe_tools

from task import calculator


async def list_tools(context: Any, page: Any) -> ListToolsResult:
    function = describe_tools([calculator])[0]["function"]
    tool = Tool(
        name=function["name"], description=function["description"], input_schema=function["parameters"]
    )
    return ListToolsResult(tools=[tool])


async def call_tool(context: Any, call: Any) -> CallToolResult:
    result = calculator((call.arguments or {}).get("expression", ""))
    return CallToolResult(content=[TextContent(type="text", text=result)])


async def main() -> None:
    server = Server("calculator", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
