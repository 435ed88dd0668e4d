"""Settings: one frozen dataclass of `rl_protocol.support.options` per group, checked when built.

Types are plain, so that any YAML reader can fill them.
"""

from rl_trainer.config.actor import ActorConfig, PolicyLossConfig
from rl_trainer.config.agent import AgentConfig, Limits, MCPConfig
from rl_trainer.config.algorithm import AlgorithmConfig, FilterGroupsConfig, KLControlConfig, OverlongConfig
from rl_trainer.config.async_rl import AsyncConfig
from rl_trainer.config.critic import CriticConfig, CriticOptimConfig
from rl_trainer.config.loop import LoopConfig
from rl_trainer.config.optim import OptimConfig
from rl_trainer.config.replay import ReplayConfig
from rl_trainer.config.rollout import RolloutConfig, ValidationSampling
from rl_trainer.config.rollout_correction import RolloutCorrectionConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "AsyncConfig",
    "CriticConfig",
    "CriticOptimConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "Limits",
    "LoopConfig",
    "MCPConfig",
    "OptimConfig",
    "OverlongConfig",
    "PolicyLossConfig",
    "ReplayConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "ValidationSampling",
]
