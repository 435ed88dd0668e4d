"""Tools of MCP servers as tools of an agent."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_protocol import ConfigError
from rl_trainer.config.agent import AgentConfig
from rl_trainer.rollout.agents.mcp.loop_thread import submit
from rl_trainer.rollout.agents.mcp.servers import KEY, ServerEntry, read_servers
from rl_trainer.rollout.agents.tools import ToolError, ToolKind

if TYPE_CHECKING:
    from rl_trainer.rollout.agents.mcp.connection import Connection, ListedTool

_MARGIN_S = 30.0
"""How much longer than its own deadline a connection may take: it ends the program of a server."""
_PART = 0.9
"""Part of AgentConfig.call_timeout_s that a server has. A session does not wait longer than all of
it, and by then a server that hangs is being replaced.
"""


class MCPTool:
    """A tool of an MCP server. The server checks the arguments.

    Args:
        listed: as the server describes it.
        connection: to the server.
        timeout_s: longest duration of a call.
        answer_chars: most characters of an answer.
    """

    def __init__(self, listed: ListedTool, connection: Connection, timeout_s: float, answer_chars: int) -> None:
        self.name, self.description = listed.name, listed.description
        self.arguments: Mapping[str, Any] = listed.schema
        self._connection = connection
        self._timeout_s = timeout_s
        self._answer_chars = answer_chars

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The text of the server's answer.

        Raises:
            ToolError: the server answers with an error, with something other than text or with too
                much of it, takes too long, or can't be reached.
        """
        done = submit(self._connection.call(self.name, dict(arguments), self._timeout_s))
        result = done.result(self._connection.start_timeout_s + self._timeout_s + _MARGIN_S)
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text[: self._answer_chars])
        if len(text) > self._answer_chars:
            raise ToolError(
                f"the answer has {len(text)} characters, more than MCPConfig.answer_chars={self._answer_chars}"
            )
        return text


def mcp_tools(config: AgentConfig) -> list[ToolKind]:
    """The tools of the servers in the file `config.mcp.servers`; empty: there are none.

    Raises:
        ConfigError: the file can't be used; and as `server_tools`.
    """
    return server_tools(read_servers(config.mcp.servers), config) if config.mcp.servers else []


def server_tools(servers: Sequence[ServerEntry], config: AgentConfig) -> list[ToolKind]:
    """The tools of these servers.

    Each server is connected to once until `forget_servers`, to list its tools. A process that calls
    them connects again, once, and keeps the connection for all sessions.

    Args:
        servers: the servers, whose file is not read again.
        config: limits of a call, and in `mcp` which tools are wanted.

    Raises:
        ConfigError: the extra `mcp` is missing, a server can't be used, two have a tool of the same
            name, or there is no such tool.
    """
    wanted = config.mcp
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(f"{KEY} needs the client of MCP: pip install 'rl-trainer[mcp]'.")
    kinds: dict[str, ToolKind] = {}
    for server in servers:
        for listed, connection in _listed(server, wanted.start_timeout_s):
            if listed.name in kinds:
                raise ConfigError(f"{KEY}: {server.name} and a server before it have a tool {listed.name!r}.")
            tool = MCPTool(listed, connection, config.call_timeout_s * _PART, wanted.answer_chars)
            kinds[listed.name] = ToolKind(partial(_same, tool), partial(_ready, connection))
    missing = [name for name in wanted.tools if name not in kinds]
    if missing:
        raise ConfigError(
            f"MCPConfig.tools must be tools of the servers, which have {', '.join(kinds)}; got {', '.join(missing)}."
        )
    return [kind for name, kind in kinds.items() if not wanted.tools or name in wanted.tools]


def forget_servers() -> None:
    """Connect to servers again where their tools are asked for next: a process that makes several
    runs does so before each, as the tools may have changed."""
    _listed.cache_clear()


@functools.cache
def _listed(server: ServerEntry, timeout_s: float) -> list[tuple[ListedTool, Connection]]:
    from rl_trainer.rollout.agents.mcp.connection import Connection, list_tools  # mcp, which takes a second

    connection = Connection(server, timeout_s)
    listed = submit(list_tools(server, timeout_s)).result(timeout_s + _MARGIN_S)
    if not listed:
        raise ConfigError(f"The MCP server {server.name} of {KEY} has no tools.")
    return [(one, connection) for one in listed]


def _same(tool: MCPTool) -> MCPTool:
    """Sessions share the tool: what an MCP server keeps is its own matter."""
    return tool


async def _ready(connection: Connection) -> None:
    """Wait until the server is connected. One that can't be is reported by each call."""
    try:
        await asyncio.wrap_future(submit(connection.ready()))
    except ToolError:
        return


def _text_of(result: Any) -> str:
    kinds = sorted({one.type for one in result.content} - {"text"})
    if kinds:
        raise ToolError(f"the answer has {', '.join(kinds)} content; only text can be read")
    if result.content or result.structured_content is None:
        return "\n".join(one.text for one in result.content)
    return json.dumps(result.structured_content, ensure_ascii=False)
