"""Tools by name, and the agent that the settings describe."""

from __future__ import annotations

from rl_protocol import ConfigError
from rl_trainer.config import AgentConfig
from rl_trainer.config.agent import AUTO
from rl_trainer.config.registry import Registry
from rl_trainer.rollout.agents.calculator import Calculator
from rl_trainer.rollout.agents.dialects.names import dialect_of_template
from rl_trainer.rollout.agents.interactions import INTERACTIONS
from rl_trainer.rollout.agents.mcp import mcp_tools
from rl_trainer.rollout.agents.tool_agent import ToolAgent
from rl_trainer.rollout.agents.tools import ToolKind

TOOLS = Registry("AgentConfig.tools", "rl_trainer.tools", ToolKind, {"calculator": ToolKind(Calculator)}, {})


def configured_agent(config: AgentConfig, template: str) -> ToolAgent:
    """The agent of these settings.

    Args:
        config: names of tools and dialect, and limits.
        template: the chat template of the model; empty: none.

    Raises:
        ConfigError: there is no tool, a name is unknown, or the template does not tell the dialect.
    """
    tools = [TOOLS.get(name) for name in config.tools] + mcp_tools(config)
    if not tools:
        raise ConfigError(
            f"AgentConfig.tools must name at least one tool for this session; there are {', '.join(TOOLS.names())}."
        )
    dialect = dialect_of_template(template) if config.dialect == AUTO else config.dialect
    interactions = {name: INTERACTIONS.get(name) for name in config.interactions}
    return ToolAgent(tools, dialect, config, interactions)
