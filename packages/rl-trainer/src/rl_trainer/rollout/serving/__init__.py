"""An OpenAI-compatible endpoint on loopback, for agents in other processes; extra `http`."""

from rl_trainer.rollout.serving.agent_session import agent_session
from rl_trainer.rollout.serving.endpoint import ENDPOINT_KEY, Endpoint, EndpointConfig
from rl_trainer.rollout.serving.policy import Policy, over_engine, over_session
from rl_trainer.rollout.serving.recorder import Completion, Recorder
from rl_trainer.rollout.serving.tokenizer import ChatTokenizer, FolderChatTokenizer

__all__ = [
    "ENDPOINT_KEY",
    "ChatTokenizer",
    "Completion",
    "Endpoint",
    "EndpointConfig",
    "FolderChatTokenizer",
    "Policy",
    "Recorder",
    "agent_session",
    "over_engine",
    "over_session",
]
