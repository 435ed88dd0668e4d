"""Sessions of several turns, with tools: loops, dialects and tools. For sessions of another kind, see `rl_trainer.sessions`."""

from rl_trainer.agents.calculator import Calculator
from rl_trainer.agents.calls import CHATML, Answer, Call, Dialect, Hermes, Malformed, Markup, PlainJSON
from rl_trainer.agents.loop import Limits, ToolAgent
from rl_trainer.agents.tools import Tool, described
from rl_trainer.agents.transcript import Transcript

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
