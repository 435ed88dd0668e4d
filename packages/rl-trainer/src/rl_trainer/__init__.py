"""PPO and GRPO trainer whose driver handles only metadata; importing loads no torch or ray."""

from rl_trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    CriticOptimConfig,
    FilterGroupsConfig,
    KLControlConfig,
    LoopConfig,
    OptimConfig,
    OverlongConfig,
    PolicyLossConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    ValidationSampling,
)
from rl_trainer.config.backends import EngineConfig, FsdpConfig, MegatronConfig, TorchConfig
from rl_trainer.config.lora import LoraConfig
from rl_trainer.data import (
    Curriculum,
    CurriculumKind,
    Mixture,
    PromptDataset,
    PromptOrder,
    PromptRow,
    PromptScores,
    ScoredCurriculum,
    ScoredOrder,
)
from rl_trainer.driver.hooks import Hook
from rl_trainer.driver.stage_calls import WorkerHandle, Workers
from rl_trainer.driver.trainer import PPOTrainer
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.graph.config_checks import check_combination
from rl_trainer.graph.stages import (
    StepGraph,
    build_graph,
    check_graph,
    needs_critic,
    needs_reference,
    needs_sum_pi_squared,
)
from rl_trainer.rollout.session_turns import Generate, SessionKind, Tokenizer, Trajectory
from rl_trainer.rollout.trajectory_stats import RolloutStats
from rl_trainer.workers.actor import ActorWorker, ReferenceWorker
from rl_trainer.workers.base import Worker
from rl_trainer.workers.columns import StepColumns, step_columns
from rl_trainer.workers.critic import CriticWorker
from rl_trainer.workers.reward import RewardWorker
from rl_trainer.workers.rollout import RolloutWorker
from rl_trainer.workers.scoring import RewardSettings

__version__ = "0.1.0"

__all__ = [
    "ActorConfig",
    "ActorWorker",
    "AlgorithmConfig",
    "CriticConfig",
    "CriticOptimConfig",
    "CriticWorker",
    "Curriculum",
    "CurriculumKind",
    "EngineConfig",
    "FilterGroupsConfig",
    "FsdpConfig",
    "Generate",
    "Hook",
    "KLControlConfig",
    "LoopConfig",
    "LoraConfig",
    "MegatronConfig",
    "Mixture",
    "OptimConfig",
    "OverlongConfig",
    "PPOTrainer",
    "PolicyLossConfig",
    "PromptDataset",
    "PromptOrder",
    "PromptRow",
    "PromptScores",
    "ReferenceWorker",
    "RewardSettings",
    "RewardWorker",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutStats",
    "RolloutWorker",
    "ScoredCurriculum",
    "ScoredOrder",
    "SessionKind",
    "StepColumns",
    "StepGraph",
    "Tokenizer",
    "TorchConfig",
    "TrainerParts",
    "Trajectory",
    "ValidationSampling",
    "Worker",
    "WorkerHandle",
    "Workers",
    "build_graph",
    "check_combination",
    "check_graph",
    "needs_critic",
    "needs_reference",
    "needs_sum_pi_squared",
    "step_columns",
]
