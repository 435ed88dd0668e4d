"""Sessions with several turns and tools: the agent loop, dialects and tools."""

from rl_trainer.config import AgentConfig, Limits
from rl_trainer.rollout.agents.calculator import Calculator
from rl_trainer.rollout.agents.dialects.base import CHATML, Answer, Call, Dialect, Hermes, Malformed, Markup, PlainJSON
from rl_trainer.rollout.agents.dialects.deepseek import DeepSeekV3
from rl_trainer.rollout.agents.dialects.glm import GLM45
from rl_trainer.rollout.agents.dialects.gpt_oss import GptOss
from rl_trainer.rollout.agents.dialects.kimi import KimiK2
from rl_trainer.rollout.agents.dialects.llama import Llama3JSON, Pythonic
from rl_trainer.rollout.agents.dialects.mistral import Mistral
from rl_trainer.rollout.agents.dialects.names import DIALECTS
from rl_trainer.rollout.agents.dialects.qwen3_coder import Qwen3Coder
from rl_trainer.rollout.agents.interactions import INTERACTIONS, Interaction, InteractionKind
from rl_trainer.rollout.agents.named import TOOLS
from rl_trainer.rollout.agents.tool_agent import ToolAgent
from rl_trainer.rollout.agents.tools import Tool, ToolError, ToolKind, described
from rl_trainer.rollout.agents.transcript import Transcript

__all__ = [
    "CHATML",
    "DIALECTS",
    "GLM45",
    "INTERACTIONS",
    "TOOLS",
    "AgentConfig",
    "Answer",
    "Calculator",
    "Call",
    "DeepSeekV3",
    "Dialect",
    "GptOss",
    "Hermes",
    "Interaction",
    "InteractionKind",
    "KimiK2",
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
