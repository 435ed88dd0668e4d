"""Kinds of sessions by name: built-in ones, and those of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rl_protocol import ConfigError
from rl_trainer.config import RolloutConfig
from rl_trainer.config.registry import Registry
from rl_trainer.data import PromptRow
from rl_trainer.data.prompt_rows import SINGLE_TURN_AGENT, TOOL_AGENT
from rl_trainer.rollout.agents import ToolAgent
from rl_trainer.rollout.agents.named import configured_agent
from rl_trainer.rollout.session_turns import SINGLE_TURN, Generate, SessionKind, Trajectory


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
    return _by_row(configured_agent(config.agent, template)) if config.session == TOOL_AGENT else kind


def _by_row(agent: ToolAgent) -> SessionKind:
    """The session of an agent, or of one turn for rows of SINGLE_TURN_AGENT."""

    async def run(row: PromptRow, generate: Generate) -> Sequence[Trajectory]:
        return await (SINGLE_TURN.run if row.agent == SINGLE_TURN_AGENT else agent.run)(row, generate)

    return replace(agent.session, run=run)
