"""Training backends by name, with their settings and defaults. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_protocol import ConfigError
from rl_protocol.support.options import Options, nearest, option, require

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """Options of a training engine; by default each model has one process."""

    @property
    def ranks(self) -> int:
        """Processes that share each trained model."""
        return 1

    def replica(self, rank: int) -> int:
        """The replica of the model that a process has, or has a part of."""
        return rank


@dataclass(frozen=True, kw_only=True)
class TorchConfig(EngineConfig):
    """One process on the CPU (model_engine=torch)."""

    param_dtype: str = option(
        "float32",
        "float32, or bfloat16: computes in it; master weights, gradient sums and optimizer stay float32",
        choices=DTYPES,
    )


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(EngineConfig):
    """FSDP2 (model_engine=fsdp): weights, gradients and optimizer state sharded over ranks."""

    world_size: int = option(1, "processes that share each trained model", ge=1)
    device: str = option("auto", "cpu (gloo), cuda (nccl), or auto: cuda where there is one", choices=DEVICES)
    param_dtype: str = option(
        "float32",
        "float32, or bfloat16: computes in it; master weights, gradient sums and optimizer stay float32",
        choices=DTYPES,
    )
    reshard_after_forward: bool = option(
        True, "free the gathered weights of a layer between forward and backward", verl="."
    )
    activation_checkpointing: bool = option(
        False,
        "keep only the inputs of each layer and compute the rest again",
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
    )
    cpu_offload: bool = option(False, "keep weights and optimizer state in host memory (cuda)", verl=".offload_policy")

    def check(self, path: str) -> None:
        require(
            not (self.cpu_offload and self.device == "cpu"),
            f"{path}cpu_offload",
            f"false with {path}device=cpu, where everything is in host memory",
            self.cpu_offload,
        )

    @property
    def ranks(self) -> int:
        return self.world_size


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(EngineConfig):
    """Megatron-Core (model_engine=megatron): tensor and pipeline parallelism."""

    tensor_model_parallel_size: int = option(1, "ranks that share each layer", ge=1, verl=".")
    pipeline_model_parallel_size: int = option(1, "stages that share the layers", ge=1, verl=".")
    sequence_parallel: bool = option(False, "the ranks that share each layer also share the tokens in between")
    world_size: int = option(0, "processes that share each trained model; 0: one replica, tensor * pipeline", ge=0)
    distributed_optimizer: bool = option(
        False, "replicas share the optimizer's state: each has its part of it alone", verl=".use_distributed_optimizer"
    )
    param_dtype: str = option(
        "float32",
        "float32, or bfloat16: holds the model and computes in it; adapters, master weights and optimizer stay float32",
        choices=DTYPES,
    )

    def check(self, path: str) -> None:
        require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            f"{path}sequence_parallel",
            f"false where {path}tensor_model_parallel_size is 1: no ranks share a layer",
            self.sequence_parallel,
        )
        require(
            self.world_size % self.replica_size == 0,
            f"{path}world_size",
            f"0 or a multiple of tensor * pipeline ({self.replica_size})",
            self.world_size,
        )

    @property
    def replica_size(self) -> int:
        """Processes that share one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def ranks(self) -> int:
        """Processes of all replicas."""
        return self.world_size or self.replica_size

    def replica(self, rank: int) -> int:
        """The replica of a process in Megatron-Core's order.

        Tensor-parallel ranks are neighbors, then come replicas, then pipeline stages.
        """
        return rank // self.tensor_model_parallel_size % (self.ranks // self.replica_size)


COMPUTE_SETTINGS = ("ppo_micro_batch_size", "ppo_max_token_len", "use_remove_padding")
"""Settings of actor and critic that change how a step is computed, but not its result."""


@dataclass(frozen=True, kw_only=True)
class TrainingBackendSpec:
    """A training backend.

    Attributes:
        name: value of `model_engine`, and the group of settings that only it reads.
        defaults: dotted keys whose default differs with this backend. Only keys that change how a
            step is computed: results are the same with every backend.
        sum_pi_squared: its policies can compute that column.
        packs_sequences: it joins the sequences of a forward pass, or cuts batches by tokens.
        state: engines of one kind of state read each other's checkpoints; empty: its own kind.

    Raises:
        ConfigError: a default for a key that no backend may change.
    """

    name: str
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    sum_pi_squared: bool = True
    packs_sequences: bool = True
    state: str = ""

    def reads_state_of(self, other: TrainingBackendSpec) -> bool:
        """Whether it continues from a checkpoint of the other."""
        return (self.state or self.name) == (other.state or other.name)

    def __post_init__(self) -> None:
        free = [f"{role}.{name}" for role in ("actor", "critic") for name in COMPUTE_SETTINGS]
        for key in self.defaults:
            if key not in free and not key.startswith(f"{self.name}."):
                raise ConfigError(
                    f"Engine {self.name!r} has a default of its own for {key}, which means the same with every engine; it may have one "
                    f"for {', '.join(free)} and its own group."
                )


TRAINING_BACKENDS: Mapping[str, TrainingBackendSpec] = {
    engine.name: engine
    for engine in (
        TrainingBackendSpec(name="torch", state="torch"),
        TrainingBackendSpec(
            name="fsdp",
            state="torch",
            defaults={"actor.use_remove_padding": True, "critic.use_remove_padding": True},
        ),
        TrainingBackendSpec(name="megatron", sum_pi_squared=False, packs_sequences=False),
    )
}
"""By name: torch is one process on the CPU, fsdp is FSDP2, megatron is Megatron-Core."""


def get_training_backend(name: str) -> TrainingBackendSpec:
    """The training backend of that name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in TRAINING_BACKENDS:
        raise ConfigError(
            f"model_engine must be one of {', '.join(TRAINING_BACKENDS)}; got {name!r}.{nearest(name, TRAINING_BACKENDS)}",
        )
    return TRAINING_BACKENDS[name]
