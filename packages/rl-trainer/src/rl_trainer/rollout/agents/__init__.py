"""Sessions with several turns and tools: the agent loop, dialects and tools."""

from rl_trainer.config import AgentConfig, Limits
from rl_trainer.rollout.agents.calculator import Calculator
from rl_trainer.rollout.agents.dialect_names import DIALECTS
from rl_trainer.rollout.agents.dialects import CHATML, Answer, Call, Dialect, Hermes, Malformed, Markup, PlainJSON
from rl_trainer.rollout.agents.interactions import INTERACTIONS, Interaction, InteractionKind
from rl_trainer.rollout.agents.llama import Llama3JSON, Pythonic
from rl_trainer.rollout.agents.mistral import Mistral
from rl_trainer.rollout.agents.named import TOOLS
from rl_trainer.rollout.agents.qwen3_coder import Qwen3Coder
from rl_trainer.rollout.agents.tool_agent import ToolAgent
from rl_trainer.rollout.agents.tools import Tool, ToolError, ToolKind, described
from rl_trainer.rollout.agents.transcript import Transcript

__all__ = [
    "CHATML",
    "DIALECTS",
    "INTERACTIONS",
    "TOOLS",
    "AgentConfig",
    "Answer",
    "Calculator",
    "Call",
    "Dialect",
    "Hermes",
    "Interaction",
    "InteractionKind",
    "Limits",
    "Llama3JSON",
    "Malformed",
    "Markup",
    "Mistral",
    "PlainJSON",
    "Pythonic",
    "Qwen3Coder",
    "Tool",
    "ToolAgent",
    "ToolError",
    "ToolKind",
    "Transcript",
    "described",
]
