"""PPO and GRPO trainer whose driver handles only metadata. Importing it loads neither torch nor ray."""

from rl_trainer.combinations import check_combination
from rl_trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    KLControlConfig,
    LoopConfig,
    OptimConfig,
    PolicyLossConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    ValidationSampling,
)
from rl_trainer.data import PromptDataset, PromptOrder, PromptRow
from rl_trainer.engines import ENGINES, Engine, FsdpConfig, get_engine
from rl_trainer.lora import LoraConfig
from rl_trainer.stages import (
    Stage,
    StepGraph,
    build_graph,
    check_graph,
    needs_critic,
    needs_reference,
    needs_sum_pi_squared,
)
from rl_trainer.trainer import PPOTrainer, TrainerParts, WorkerHandle, Workers
from rl_trainer.workers import ActorWorker, CriticWorker, ReferenceWorker, RewardWorker, RolloutWorker, Worker

__version__ = "0.1.0"

__all__ = [
    "ENGINES",
    "ActorConfig",
    "ActorWorker",
    "AlgorithmConfig",
    "CriticConfig",
    "CriticWorker",
    "Engine",
    "FsdpConfig",
    "KLControlConfig",
    "LoopConfig",
    "LoraConfig",
    "OptimConfig",
    "PPOTrainer",
    "PolicyLossConfig",
    "PromptDataset",
    "PromptOrder",
    "PromptRow",
    "ReferenceWorker",
    "RewardWorker",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutWorker",
    "Stage",
    "StepGraph",
    "TrainerParts",
    "ValidationSampling",
    "Worker",
    "WorkerHandle",
    "Workers",
    "build_graph",
    "check_combination",
    "check_graph",
    "get_engine",
    "needs_critic",
    "needs_reference",
    "needs_sum_pi_squared",
]
