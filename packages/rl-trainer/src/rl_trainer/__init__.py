"""PPO and GRPO trainer whose driver handles only metadata. Importing it loads neither torch nor ray."""

from rl_trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    LoopConfig,
    OptimConfig,
    RolloutConfig,
    ValidationSampling,
)
from rl_trainer.data import PromptDataset, PromptOrder, PromptRow
from rl_trainer.stages import Stage, StepGraph, build_graph, check_graph, needs_critic, needs_reference
from rl_trainer.trainer import PPOTrainer, TrainerParts, WorkerHandle, Workers
from rl_trainer.workers import ActorWorker, CriticWorker, ReferenceWorker, RewardWorker, RolloutWorker, Worker

__version__ = "0.1.0"

__all__ = [
    "ActorConfig",
    "ActorWorker",
    "AlgorithmConfig",
    "CriticConfig",
    "CriticWorker",
    "LoopConfig",
    "OptimConfig",
    "PPOTrainer",
    "PromptDataset",
    "PromptOrder",
    "PromptRow",
    "ReferenceWorker",
    "RewardWorker",
    "RolloutConfig",
    "RolloutWorker",
    "Stage",
    "StepGraph",
    "TrainerParts",
    "ValidationSampling",
    "Worker",
    "WorkerHandle",
    "Workers",
    "build_graph",
    "check_graph",
    "needs_critic",
    "needs_reference",
]
