"""Tools of MCP servers, over standard streams and over HTTP."""
