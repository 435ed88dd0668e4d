"""Sessions with several turns and tools: the agent loop, dialects and tools."""

from rl_trainer.rollout.agents.calculator import Calculator
from rl_trainer.rollout.agents.dialects import CHATML, Answer, Call, Dialect, Hermes, Malformed, Markup, PlainJSON
from rl_trainer.rollout.agents.tool_agent import Limits, ToolAgent
from rl_trainer.rollout.agents.tools import Tool, described
from rl_trainer.rollout.agents.transcript import Transcript

__all__ = [
    "CHATML",
    "Answer",
    "Calculator",
    "Call",
    "Dialect",
    "Hermes",
    "Limits",
    "Malformed",
    "Markup",
    "PlainJSON",
    "Tool",
    "ToolAgent",
    "Transcript",
    "described",
]
