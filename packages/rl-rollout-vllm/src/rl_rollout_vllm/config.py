"""Settings of one vLLM engine, and the environment its processes need. Pure: vLLM is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_protocol.errors import ConfigError
from rl_rollout_vllm.availability import Device
from rl_rollout_vllm.sampling import LogprobsMode

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest adapter ranks that vLLM can make room for."""

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The LoRA adapters an engine takes; vLLM reserves their memory when it starts.

    Attributes:
        rank: the largest rank an adapter may have.
        alpha: adapters that come without a configuration of their own are scaled by alpha / rank.
        target_modules: last names of the adapted modules, such as `q_proj`.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    def __post_init__(self) -> None:
        _require(self.rank in RANKS, "adapter.rank", f"one of {RANKS}", self.rank)
        _require(self.alpha > 0, "adapter.alpha", "greater than 0", self.alpha)
        _require(bool(self.target_modules), "adapter.target_modules", "at least one name", self.target_modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig:
    """One engine.

    Attributes:
        model_path: Hugging Face checkpoint folder; its weights are version 0.
        dtype: what the engine computes in; weights of other precisions are converted when they are loaded.
        max_model_len: most tokens of prompt and response together; 0: the model's context.
        max_num_seqs: responses generated side by side.
        kv_cache_bytes: memory for keys and values.
        logprobs_mode: which log-probs vLLM reports; see `rl_rollout_vllm.sampling`.
        enforce_eager: no compilation and no CUDA graphs.
        prefix_caching: keep keys and values of prompts for later requests (until the next update of the weights).
        bucket_bytes: most bytes of weights handed to the engine's process at once; a larger tensor goes alone.
        threads: compute threads of each process of the engine on CPU.
        tensor_parallel_size: processes, or GPUs, that share each layer. Each is handed all weights of an update and keeps its shard.
        sleep_mode: have vLLM allocate GPU memory so that `sleep` can give it back; on CPU `sleep` needs no preparation.
        adapter: adapters to make room for; None: none.
        start_timeout_s: longest start.
        call_timeout_s: longest wait for an update of the weights, or of a request for admission.
    """

    model_path: str
    dtype: Precision = "float32"
    max_model_len: int = 0
    max_num_seqs: int = 256
    kv_cache_bytes: int = 1 << 30
    logprobs_mode: LogprobsMode = "processed_logprobs"
    enforce_eager: bool = True
    prefix_caching: bool = True
    bucket_bytes: int = 64 << 20
    threads: int = 1
    tensor_parallel_size: int = 1
    sleep_mode: bool = False
    adapter: AdapterConfig | None = None
    start_timeout_s: float = 600.0
    call_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _require(bool(self.model_path), "model_path", "a folder", self.model_path)
        _require(self.max_model_len >= 0, "max_model_len", "at least 0", self.max_model_len)
        for name in ("max_num_seqs", "kv_cache_bytes", "bucket_bytes", "threads", "tensor_parallel_size"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("start_timeout_s", "call_timeout_s"):
            _require(getattr(self, name) > 0, name, "greater than 0", getattr(self, name))


def environment(config: VLLMConfig, device: Device) -> dict[str, str]:
    """What must be in the environment before vLLM is imported, in this process and in the engine's, which inherits it."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device == "cuda":
        return common
    cpu = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process: one process fewer
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each engine takes the same first cores for itself
        "OMP_NUM_THREADS": str(config.threads),
        # memory that is freed stays with the process: an update prepacks all weights anew, and page faults would be half of its time
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 60),
    }
    if config.enforce_eager:
        cpu["TORCHDYNAMO_DISABLE"] = "1"  # else the first log-probs are compiled all the same, and need a C++ compiler
    return common | cpu


def _require(fine: bool, name: str, wanted: str, got: object) -> None:
    if not fine:
        raise ConfigError(f"vLLM engine: {name} must be {wanted}; got {got!r}.", field=name)
