"""An OpenAI-compatible endpoint on loopback, so that an agent of its own process drives rollouts. Needs the extra `http` (aiohttp)."""

from rl_trainer.serving.agents import agent_session
from rl_trainer.serving.codec import ChatCodec, TextCodec
from rl_trainer.serving.endpoint import ENDPOINT_KEY, Endpoint, EndpointConfig
from rl_trainer.serving.policies import Policy, over_engine, over_session
from rl_trainer.serving.recorder import Completion, Recorder

__all__ = [
    "ENDPOINT_KEY",
    "ChatCodec",
    "Completion",
    "Endpoint",
    "EndpointConfig",
    "Policy",
    "Recorder",
    "TextCodec",
    "agent_session",
    "over_engine",
    "over_session",
]
