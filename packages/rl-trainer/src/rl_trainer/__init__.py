"""PPO and GRPO trainer whose driver handles only metadata. Importing it loads neither torch nor ray."""

from rl_trainer.combinations import check_combination
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
from rl_trainer.course import Course
from rl_trainer.data import Curriculum, CurriculumKind, Mixture, PromptDataset, PromptOrder, PromptRow
from rl_trainer.dispatch import WorkerHandle, Workers
from rl_trainer.engines import ENGINES, Engine, FsdpConfig, MegatronConfig, get_engine
from rl_trainer.hooks import Hook
from rl_trainer.lora import LoraConfig
from rl_trainer.reward_worker import RewardWorker
from rl_trainer.rollout_worker import RolloutWorker
from rl_trainer.sessions import Codec, Generate, SessionKind, Trajectory
from rl_trainer.stages import (
    Stage,
    StepGraph,
    build_graph,
    check_graph,
    needs_critic,
    needs_reference,
    needs_sum_pi_squared,
)
from rl_trainer.trainer import PPOTrainer, TrainerParts
from rl_trainer.worker import Worker
from rl_trainer.workers import ActorWorker, CriticWorker, ReferenceWorker

__version__ = "0.1.0"

__all__ = [
    "ENGINES",
    "ActorConfig",
    "ActorWorker",
    "AlgorithmConfig",
    "Codec",
    "Course",
    "CriticConfig",
    "CriticOptimConfig",
    "CriticWorker",
    "Curriculum",
    "CurriculumKind",
    "Engine",
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
    "ReferenceWorker",
    "RewardWorker",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutWorker",
    "SessionKind",
    "Stage",
    "StepGraph",
    "TrainerParts",
    "Trajectory",
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
