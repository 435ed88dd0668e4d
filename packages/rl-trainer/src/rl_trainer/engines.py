"""Training engines: what can be set of each, and what each prefers where engines may differ. No torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_protocol import ConfigError
from rl_trainer.algorithms.registry import nearest
from rl_trainer.settings import option, require

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """FSDP2: weights, gradients and optimizer state spread over ranks, one process each (with model_engine=fsdp)."""

    world_size: int = option(1, "processes that share each trained model")
    device: str = option("auto", "cpu (gloo), cuda (nccl), or auto: cuda where there is one")
    param_dtype: str = option(
        "float32", "float32, or bfloat16: computes in it; master weights, gradient sums and optimizer stay float32"
    )
    reshard_after_forward: bool = option(True, "free the gathered weights of a layer between forward and backward")
    activation_checkpointing: bool = option(False, "keep only the inputs of each layer and compute the rest again")
    cpu_offload: bool = option(False, "keep weights and optimizer state in host memory (cuda)")

    def __post_init__(self) -> None:
        require(self.world_size >= 1, "fsdp.world_size", "at least 1", self.world_size)
        require(self.device in DEVICES, "fsdp.device", f"one of {DEVICES}", self.device)
        require(self.param_dtype in DTYPES, "fsdp.param_dtype", f"one of {DTYPES}", self.param_dtype)
        require(
            not (self.cpu_offload and self.device == "cpu"),
            "fsdp.cpu_offload",
            "false with fsdp.device=cpu, where everything is in host memory",
            self.cpu_offload,
        )


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Megatron-Core: a model cut by layers and stages (with model_engine=megatron)."""

    tensor_model_parallel_size: int = option(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = option(1, "stages that share the layers")
    sequence_parallel: bool = option(False, "the ranks that share each layer also share the tokens in between")
    world_size: int = option(0, "processes that share each trained model; 0: one replica, tensor * pipeline")
    distributed_optimizer: bool = option(False, "replicas share the optimizer's state: each has its part of it alone")
    param_dtype: str = option(
        "float32",
        "float32, or bfloat16: holds the model and computes in it; adapters, master weights and optimizer stay float32",
    )

    def __post_init__(self) -> None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        for name in sizes:
            require(getattr(self, name) >= 1, f"megatron.{name}", "at least 1", getattr(self, name))
        require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "megatron.sequence_parallel",
            "false where megatron.tensor_model_parallel_size is 1: no ranks share a layer",
            self.sequence_parallel,
        )
        require(
            self.world_size >= 0 and self.world_size % self.replica_size == 0,
            "megatron.world_size",
            f"0 or a multiple of tensor * pipeline ({self.replica_size})",
            self.world_size,
        )
        require(self.param_dtype in DTYPES, "megatron.param_dtype", f"one of {DTYPES}", self.param_dtype)

    @property
    def replica_size(self) -> int:
        """Processes that share one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def ranks(self) -> int:
        """Processes of all replicas."""
        return self.world_size or self.replica_size

    def replica(self, rank: int) -> int:
        """Which replica a process is part of, in Megatron-Core's order: those of a layer are neighbours, then come replicas, then stages."""
        return rank // self.tensor_model_parallel_size % (self.ranks // self.replica_size)


HOW = ("ppo_micro_batch_size", "ppo_max_token_len", "use_remove_padding")
"""Settings of actor and critic that say how to compute, not what."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A training engine by name.

    Attributes:
        name: what `model_engine` is set to.
        group: the group of settings that it alone reads; empty: it has none.
        defaults: dotted key -> its default with this engine, where that is not the schema's. Only keys that say how to compute: what is
            learnt is the same with every engine.
        sum_pi_squared: its policies compute that column.

    Raises:
        ConfigError: a default for a key that no engine may change.
    """

    name: str
    group: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    sum_pi_squared: bool = True

    def __post_init__(self) -> None:
        free = [f"{role}.{name}" for role in ("actor", "critic") for name in HOW]
        for key in self.defaults:
            if key not in free and not (self.group and key.startswith(f"{self.group}.")):
                raise ConfigError(
                    f"Engine {self.name!r} has a default of its own for {key}, which means the same with every engine; it may have one "
                    f"for {', '.join(free)} and its own group."
                )


ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(name="torch"),
        Engine(
            name="fsdp",
            group="fsdp",
            defaults={"actor.use_remove_padding": True, "critic.use_remove_padding": True},
        ),
        Engine(name="megatron", group="megatron", sum_pi_squared=False),
    )
}
"""By name: torch is one process on the CPU, fsdp is FSDP2, megatron is Megatron-Core."""


def get_engine(name: str) -> Engine:
    """The engine of that name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in ENGINES:
        raise ConfigError(
            f"model_engine must be one of {', '.join(ENGINES)}; got {name!r}.{nearest(name, ENGINES)}",
        )
    return ENGINES[name]
