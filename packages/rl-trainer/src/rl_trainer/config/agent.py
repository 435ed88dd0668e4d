"""Settings of agents: the tools that the policy can call, and how."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, group, option

AUTO = "auto"
"""Value of AgentConfig.dialect that takes the dialect of the model's chat template."""
DIALECT_NAMES = (
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "pythonic",
    "glm45",
    "deepseek_v3",
    "kimi_k2",
    "openai",
)
"""Dialects, by the names that vLLM gives its parsers of tool calls (`--tool-call-parser`)."""


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """Limits of one session. RolloutConfig.response_length bounds all of it, observations included.

    Sessions whose next turns have equal limits are generated in one batch: most of them with
    `turn_tokens`, few without.
    """

    turns: int = option(8, "most turns of the policy in a session", ge=1)
    turn_tokens: int = option(0, "most tokens of one turn; 0: what is left of the response", ge=0)
    observation_tokens: int = option(
        0, "most tokens of all answers of a session; 0: what is left of the response", ge=0
    )
    answer_chars: int = option(4096, "most characters of one answer; the rest is cut off", ge=1)
    calls: int = option(0, "most tool calls of a session; further ones are answered with an error; 0: no limit", ge=0)
    call_timeout_s: float = option(10.0, "longest duration of one call, seconds", gt=0)


@dataclass(frozen=True, kw_only=True)
class MCPConfig(Options):
    """Tools of MCP servers."""

    servers: str = option("", "JSON file of MCP servers (mcpServers), whose tools the policy can call")
    tools: tuple[str, ...] = option((), "which tools of these servers; empty: all", needs="servers")
    start_timeout_s: float = option(30.0, "longest start of a server, seconds", gt=0, needs="servers")
    answer_chars: int = option(
        65536, "an answer of a server with more characters is an error, whatever answer_chars is", ge=1, needs="servers"
    )


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Limits):
    """Tools that the policy can call, and how."""

    tools: tuple[str, ...] = option((), "tools that the policy can call", plugins="rl_trainer.tools")
    mcp: MCPConfig = group(MCPConfig, "tools of MCP servers")
    interactions: tuple[str, ...] = option(
        (),
        "what interaction_kwargs of a row may name, to reply to turns that call no tool",
        plugins="rl_trainer.interactions",
    )
    dialect: str = option(
        AUTO,
        "how calls and answers are written; auto: as the model's chat template tells",
        choices=(AUTO, *DIALECT_NAMES),
    )
