"""A connection to one MCP server. The only module that imports mcp."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx2
import mcp
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from rl_protocol import ConfigError
from rl_trainer.rollout.agents.mcp.servers import ServerEntry
from rl_trainer.rollout.agents.tools import ToolError

_LAUNCHER = (
    "import os, sys; from rl_protocol.support.host.this_process import end_with_parent; "
    "end_with_parent(); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Becomes the server, which so ends with this process even if it hangs."""
_PAGES = 100
_HTTP_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""As the client's own; the calls have shorter ones."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its server describes it."""

    name: str
    description: str
    schema: Mapping[str, Any]
    """JSON schema of the arguments, an object."""


async def list_tools(server: ServerEntry, timeout_s: float) -> list[ListedTool]:
    """The tools of a server, by a connection of its own.

    Raises:
        ConfigError: the server can't be reached, does not answer in time, or ends; names it.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            async with asyncio.timeout(timeout_s), _connected(server, log) as client:
                return await _all_tools(client)
        except TimeoutError as error:
            reason = f"it did not answer within MCPConfig.start_timeout_s={timeout_s:g}"
            raise ConfigError(_unusable(server, reason, log)) from error
        except (*_FAILURES, ExceptionGroup) as error:
            raise ConfigError(_unusable(server, _why(error), log)) from error


class Connection:
    """A connection that is opened when it is needed, and again after the server was lost.

    All methods run on one event loop. A task of its own enters and leaves the client.

    Args:
        server: the server.
        start_timeout_s: longest start.
    """

    def __init__(self, server: ServerEntry, start_timeout_s: float) -> None:
        self._server = server
        self.start_timeout_s = start_timeout_s
        self._open: _Open | None = None

    async def ready(self) -> mcp.Client:
        """The client, once it is connected.

        Raises:
            ToolError: the server can't be reached.
        """
        return await asyncio.shield(self._current().client)

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> mcp.types.CallToolResult:
        """Call a tool.

        A call that takes too long is cancelled. If the server has answered nothing else meanwhile,
        it is taken to hang: it is ended, and the next call starts it again.

        Raises:
            ToolError: the server refused the call, took too long, or was lost.
        """
        client, now = await self.ready(), self._current()
        begun = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                result = await client.call_tool(tool, arguments)
        except TimeoutError as error:
            if now.answered < begun:
                self._drop(now)
            raise ToolError(f"the MCP server {self._server.name} took longer than {timeout_s:g} s") from error
        except mcp.MCPError as error:
            if error.code == mcp.types.CONNECTION_CLOSED:
                self._drop(now)
                raise ToolError(f"the MCP server {self._server.name} has ended") from error
            now.answered = time.monotonic()
            raise ToolError(str(error)) from error
        except _FAILURES as error:
            self._drop(now)
            raise ToolError(f"the MCP server {self._server.name} was lost: {_why(error)}") from error
        now.answered = time.monotonic()
        return result

    async def close(self) -> None:
        """End the connection, and the program of the server."""
        if self._open is not None:
            ended = self._open
            self._drop(ended)
            await asyncio.wait([ended.owner])

    def _current(self) -> _Open:
        if self._open is None or self._open.owner.done():
            client: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
            stop = asyncio.Event()
            self._open = _Open(client, stop, asyncio.create_task(self._own(client, stop)))
        return self._open

    def _drop(self, lost: _Open) -> None:
        lost.stop.set()
        if self._open is lost:
            self._open = None

    async def _own(self, client: asyncio.Future[mcp.Client], stop: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self.start_timeout_s) as limit, _connected(self._server, sys.__stderr__) as one:
                limit.reschedule(None)
                client.set_result(one)
                await stop.wait()
        except (*_FAILURES, ExceptionGroup) as error:
            self._refuse(client, _why(error))
        finally:
            self._refuse(client, "the client ended")

    def _refuse(self, client: asyncio.Future[mcp.Client], why: str) -> None:
        """Tell those who wait for a client that there is none."""
        if not client.done():
            client.set_exception(ToolError(f"the MCP server {self._server.name} can't be used: {why}"))
            client.exception()  # there may be no one


@dataclass(slots=True)
class _Open:
    client: asyncio.Future[mcp.Client]
    stop: asyncio.Event
    owner: asyncio.Task[None]
    answered: float = field(default=0.0)
    """When the last answer came, seconds of the monotonic clock."""


_FAILURES = (OSError, TimeoutError, RuntimeError, ValueError, mcp.MCPError, httpx2.HTTPError)
"""What the client raises for a server that can't be used."""


@asynccontextmanager
async def _connected(server: ServerEntry, log: TextIO | None) -> AsyncGenerator[mcp.Client]:
    if server.url:
        async with (
            httpx2.AsyncClient(headers=dict(server.headers), timeout=_HTTP_TIMEOUT) as http,
            mcp.Client(streamable_http_client(server.url, http_client=http), cache=None) as client,
        ):
            yield client
        return
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-c", _LAUNCHER, *server.command],
        env=dict(server.env),
        cwd=server.cwd or None,
    )
    async with mcp.Client(stdio_client(parameters, log or sys.stderr), cache=None) as client:
        yield client


async def _all_tools(client: mcp.Client) -> list[ListedTool]:
    found: list[ListedTool] = []
    cursor: str | None = None
    for _ in range(_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += [ListedTool(one.name, one.description or "", dict(one.input_schema)) for one in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return found
    raise RuntimeError(f"it lists more than {_PAGES} pages of tools")


def _unusable(server: ServerEntry, reason: str, log: TextIO) -> str:
    log.seek(0)
    said = log.read()[-2000:].strip().splitlines()
    last = f" The last line of its stderr: {said[-1]}" if said else ""
    where = server.url or " ".join(server.command)
    return f"The MCP server {server.name} ({where}) can't be used: {reason}.{last}"


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": ")
