"""The parts that the training loop composes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_protocol import Tag
from rl_protocol.ports import DataPlane, ReplayBuffer, RolloutMemory, WeightSync
from rl_trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    AsyncConfig,
    CriticConfig,
    FilterGroupsConfig,
    LoopConfig,
    ReplayConfig,
    RolloutConfig,
)
from rl_trainer.data import PromptOrder
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.driver.hooks import Hook
from rl_trainer.driver.stage_calls import Workers
from rl_trainer.graph.stages import StepGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepRows:
    """Which rows of a data plane a restarted run may use."""

    run: str
    """Name of the run."""
    settings: str
    """Digest of the settings that the weights depend on; rows of other settings are discarded."""

    @property
    def tags(self) -> Tag:
        """As the data plane stores them."""
        return {"run": self.run, "settings": self.settings}


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """Where the batches of steps are kept."""

    path: Path
    """Created with the first batch."""
    config: str
    """The configuration of the run, YAML."""


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """The parts that the loop composes."""

    graph: StepGraph
    plane: DataPlane
    buffers: Mapping[str, ReplayBuffer]
    """The open replay buffer of each of `rl_trainer.workers.columns.PARTITIONS`."""
    workers: Workers
    weight_sync: WeightSync | None
    """None: rollout keeps the initial weights, and the staleness of the batches grows."""
    sync_first: bool = False
    """The policy starts from other weights than the rollout has loaded: `PPOTrainer.resume` sends
    them also without a checkpoint."""
    train_order: PromptOrder
    sessions: Callable[[int], int] | None = None
    """Row of the training data -> responses to its prompt; None: `rollout.n` to each."""
    validation_size: int
    rollout: RolloutConfig
    actor: ActorConfig
    critic: CriticConfig
    loop: LoopConfig
    on_step: Callable[[int, Mapping[str, float]], None]
    """Called with (step, metrics) after each step; step 0 is the validation before training."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Read only if the graph has the stage `filter`."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """What happens to prompts whose rollouts fail. The buffers must have the same settings."""
    async_rl: AsyncConfig = field(default_factory=AsyncConfig)
    """How far generation may run ahead."""
    rollout_memory: RolloutMemory | None = None
    """Freed while the models are updated, with async_rl.max_staleness=0 only; None: never."""
    old_log_prob_tolerance: float = AlgorithmConfig.old_log_prob_tolerance
    """Read only if the graph has the stage `log_prob_gap`."""
    checkpoints: CheckpointWriter | None = None
    """Writes a checkpoint every loop.save_freq steps and after the last step; None: none."""
    batches: BatchFolder | None = None
    """Where `loop.keep_batches` keeps the batches of steps; None: nowhere."""
    keep_rows: KeepRows | None = None
    """For a data plane whose rows survive a restart: rows of trained steps are kept until the
    checkpoint that contains the training is published. None: until they are trained."""
    hooks: Mapping[str, Hook] = field(default_factory=dict[str, Hook])
    """Hooks by name, called at each event of the loop."""
