"""Kinds of sessions by name: built-in ones, and those of installed packages."""

from __future__ import annotations

from rl_protocol import ConfigError
from rl_trainer.config import RolloutConfig
from rl_trainer.config.registry import Registry
from rl_trainer.data import PromptRow
from rl_trainer.rollout.agents.named import configured_agent
from rl_trainer.rollout.session_turns import SINGLE_TURN, Generate, SessionKind, Trajectory

TOOL_AGENT = "tool_agent"


async def _without_settings(row: PromptRow, generate: Generate) -> list[Trajectory]:
    del row, generate
    raise ConfigError(f"RolloutConfig.session={TOOL_AGENT} depends on AgentConfig.tools; get it by `session_kind`.")


SESSIONS = Registry(
    "RolloutConfig.session",
    "rl_trainer.sessions",
    SessionKind,
    {"single_turn": SINGLE_TURN, TOOL_AGENT: SessionKind(_without_settings)},
    {"single_turn_agent": "single_turn", "calculator": TOOL_AGENT},
)


def session_kind(config: RolloutConfig, template: str) -> SessionKind:
    """The kind of session that these settings choose.

    Args:
        config: its name, and the settings of the tool agent.
        template: the chat template of the model; empty: none.

    Raises:
        ConfigError: there is no such kind, or its tools or dialect can't be used.
    """
    kind = SESSIONS.get(config.session)
    return configured_agent(config.agent, template).session if config.session == TOOL_AGENT else kind
