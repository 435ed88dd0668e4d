"""Options of the training backends, and what they say of ranks and devices. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_protocol.support.options import Options, option, require

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")
RECOMPUTE = "keep only the inputs of each layer and recompute the rest in the backward pass"
COMPUTE_TYPE = "float32, or bfloat16: type of the computation and of frozen weights; trained weights, gradient sums and optimizer stay float32"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """Options of a training engine; by default a model has one process, in float32."""

    @property
    def ranks(self) -> int:
        """Processes that share each trained model."""
        return 1

    @property
    def trains_on(self) -> str:
        """Device of the models: cpu, cuda, or auto for cuda where there is one."""
        return "cpu"

    @property
    def computes_in(self) -> str:
        """Element type of the computation."""
        return "float32"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is in host memory between updates, and no gradients are
        kept."""
        return False

    def check_gpus(self, path: str, count: Callable[[], int]) -> None:
        """Check that this machine has the GPUs that the options need.

        Args:
            path: what to write before the name of an option.
            count: the number of GPUs that torch finds, which takes seconds.

        Raises:
            ConfigError: it has not; names the option, and its value without a GPU.
        """

    def replica(self, rank: int) -> int:
        """The replica of the model that a process has, or has a part of."""
        return rank


def _check_offload(offload: bool, key: str, device: str, path: str) -> None:
    require(
        not (offload and device == "cpu"),
        key,
        f"false with {path}device=cpu, where everything is in host memory",
        offload,
    )


@dataclass(frozen=True, kw_only=True)
class TorchConfig(EngineConfig):
    """One process (model_engine=torch)."""

    device: str = option("auto", "cpu, cuda, or auto: cuda where there is one", choices=DEVICES)
    param_dtype: str = option("float32", COMPUTE_TYPE, choices=DTYPES)
    activation_checkpointing: bool = option(False, RECOMPUTE)
    optimizer_offload: bool = option(
        False, "between updates, keep the state of AdamW in host memory and no gradients (cuda)"
    )

    def check(self, path: str) -> None:
        _check_offload(self.optimizer_offload, f"{path}optimizer_offload", self.device, path)

    @property
    def trains_on(self) -> str:
        return self.device

    @property
    def offloads_optimizer(self) -> bool:
        return self.optimizer_offload

    @property
    def computes_in(self) -> str:
        return self.param_dtype

    def check_gpus(self, path: str, count: Callable[[], int]) -> None:
        _check_device(self.device, path, count)


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(EngineConfig):
    """FSDP2 (model_engine=fsdp): weights, gradients and optimizer state sharded over ranks."""

    world_size: int = option(1, "processes that share each trained model", ge=1)
    device: str = option("auto", "cpu (gloo), cuda (nccl), or auto: cuda where there is one", choices=DEVICES)
    param_dtype: str = option("float32", COMPUTE_TYPE, choices=DTYPES)
    reshard_after_forward: bool = option(
        True, "free the gathered weights of a layer between forward and backward", verl="."
    )
    activation_checkpointing: bool = option(
        False,
        RECOMPUTE,
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
    )
    cpu_offload: bool = option(False, "keep weights and optimizer state in host memory (cuda)", verl=".offload_policy")
    optimizer_offload: bool = option(
        False, "between updates, keep the state of AdamW in host memory and no gradients (cuda)", verl="."
    )

    def check(self, path: str) -> None:
        _check_offload(self.cpu_offload, f"{path}cpu_offload", self.device, path)
        _check_offload(self.optimizer_offload, f"{path}optimizer_offload", self.device, path)
        require(
            not (self.cpu_offload and self.optimizer_offload),
            f"{path}optimizer_offload",
            f"false with {path}cpu_offload=true, which keeps the optimizer's state in host memory also during updates",
            self.optimizer_offload,
        )

    @property
    def ranks(self) -> int:
        return self.world_size

    @property
    def trains_on(self) -> str:
        return self.device

    @property
    def offloads_optimizer(self) -> bool:
        return self.optimizer_offload

    @property
    def computes_in(self) -> str:
        return self.param_dtype

    def check_gpus(self, path: str, count: Callable[[], int]) -> None:
        _check_device(self.device, path, count)
        if self.cpu_offload:
            remedy = f"{path}cpu_offload=false: without a GPU everything is in host memory"
            require_gpu(count(), f"{path}cpu_offload=true", remedy)
        found = count() if self.device != "cpu" and self.world_size > 1 else 0
        if 0 < found < self.world_size:
            raise ConfigError(
                f"{path}world_size must be at most {found}, the GPUs that torch finds on this machine, with "
                f"{path}device={self.device}; got {self.world_size}. Lower it, or set {path}device=cpu."
            )


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(EngineConfig):
    """Megatron-Core (model_engine=megatron): tensor, pipeline and expert parallelism."""

    tensor_model_parallel_size: int = option(1, "ranks that share each layer", ge=1, verl=".")
    pipeline_model_parallel_size: int = option(1, "stages that share the layers", ge=1, verl=".")
    sequence_parallel: bool = option(False, "the ranks that share each layer also share the tokens in between")
    expert_model_parallel_size: int = option(
        1, "replicas of the model that share the experts of each layer; each has a copy of the rest", ge=1, verl="."
    )
    world_size: int = option(
        0, "processes that share each trained model; 0: the fewest, tensor * pipeline * expert", ge=0
    )
    distributed_optimizer: bool = option(
        False, "shard the optimizer's state over the replicas (ZeRO-1)", verl=".use_distributed_optimizer"
    )
    param_dtype: str = option(
        "float32",
        "float32, or bfloat16: type of the model and of the computation; adapters, master weights and optimizer stay float32",
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
            self.world_size % self._fewest == 0,
            f"{path}world_size",
            f"0 or a multiple of tensor * pipeline * expert ({self._fewest})",
            self.world_size,
        )
        require(
            not self.distributed_optimizer or self.expert_model_parallel_size == 1,
            f"{path}distributed_optimizer",
            f"false with {path}expert_model_parallel_size={self.expert_model_parallel_size}: replicas hold different experts",
            self.distributed_optimizer,
        )

    @property
    def replica_size(self) -> int:
        """Processes that share one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def ranks(self) -> int:
        """Processes of all replicas."""
        return self.world_size or self._fewest

    @property
    def _fewest(self) -> int:
        return self.replica_size * self.expert_model_parallel_size

    @property
    def trains_on(self) -> str:
        return "auto"

    @property
    def computes_in(self) -> str:
        return self.param_dtype

    def check_gpus(self, path: str, count: Callable[[], int]) -> None:
        if self.expert_model_parallel_size > 1 and self.tensor_model_parallel_size > 1:
            size = f"{path}tensor_model_parallel_size={self.tensor_model_parallel_size}"
            remedy = f"{path}expert_model_parallel_size=1: gloo can't gather numbers of tokens that differ"
            setting = f"{path}expert_model_parallel_size={self.expert_model_parallel_size} with {size}"
            require_gpu(count(), setting, remedy)

    def replica(self, rank: int) -> int:
        """The replica of a process in Megatron-Core's order.

        Tensor-parallel ranks are neighbors, then come replicas, then pipeline stages.
        """
        return rank // self.tensor_model_parallel_size % (self.ranks // self.replica_size)


def _check_device(device: str, path: str, count: Callable[[], int]) -> None:
    if device == "cuda":
        require_gpu(count(), f"{path}device=cuda", f"{path}device=cpu or auto")


def require_gpu(found: int, setting: str, remedy: str) -> None:
    """Raise ConfigError for a setting that needs a GPU if `found` is 0; `remedy` does without."""
    if not found:
        raise ConfigError(
            f"{setting} needs an NVIDIA GPU, and torch finds none on this machine. Set {remedy}, or run on a machine with one."
        )
