"""An MCP server for tests: `mcp_program.py stdio`, or `mcp_program.py http PORT_FILE`."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("letters", log_level="WARNING")
calls = 0


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """The number of calls of this tool in this process."""
    global calls
    calls += 1
    return f"{calls} in {os.getpid()}"


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def much(letters: int) -> str:
    """Say a lot."""
    return "x" * letters


@server.tool()
def picture() -> Image:
    """Show a picture."""
    return Image(data=b"PNG", format="png")


@server.tool()
async def wait(seconds: float) -> str:
    """Wait, while other calls are served."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
async def hang() -> str:
    """Serve nothing any more."""
    time.sleep(600)  # noqa: ASYNC251 - that is the point
    return "never"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


def main() -> None:
    if sys.argv[1] == "stdio":
        server.run("stdio")
        return
    listening = socket.create_server(("127.0.0.1", 0))
    Path(sys.argv[2]).write_text(str(listening.getsockname()[1]))
    app = server.streamable_http_app()
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
