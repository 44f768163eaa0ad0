"""A real MCP server: `python calculator.py` over its standard streams, `… PORT` over HTTP on the loopback."""

import asyncio
import os
import sys

from mcp.server import MCPServer

server = MCPServer("calculator")
calls = 0


@server.tool()
def add(left: int, right: int) -> str:
    """Add two whole numbers."""
    return str(left + right)


@server.tool()
async def meet(count: int) -> str:
    """Answer once there have been so many calls."""
    global calls
    calls += 1
    while calls < count:  # noqa: ASYNC110  calls are a number
        await asyncio.sleep(0.01)
    return "met"


@server.tool()
def environment(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "(not set)")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]), json_response=True)
    else:
        server.run()
