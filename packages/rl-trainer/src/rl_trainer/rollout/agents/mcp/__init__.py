"""Tools of MCP servers, over stdio and streamable HTTP; extra `mcp`."""

from rl_trainer.rollout.agents.mcp.servers import ServerEntry, read_servers
from rl_trainer.rollout.agents.mcp.tools import MCPTool, forget_servers, mcp_tools, server_tools

__all__ = ["MCPTool", "ServerEntry", "forget_servers", "mcp_tools", "read_servers", "server_tools"]
