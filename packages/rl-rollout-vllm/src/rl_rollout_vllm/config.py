"""Settings of a vLLM engine, and the environment variables of its processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rl_protocol.errors import ConfigError
from rl_rollout_vllm.availability import Device
from rl_rollout_vllm.sampling import LogprobsMode

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `AdapterConfig.rank` that vLLM supports."""

CPU_KV_CACHE = 256 << 20
"""Bytes for keys and values on the CPU, by default."""

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The LoRA adapters that an engine can load; vLLM reserves their memory when it starts.

    Attributes:
        rank: largest rank of an adapter.
        alpha: adapters without their own configuration are scaled by alpha / rank.
        target_modules: last parts of the adapted modules' names, such as `q_proj`.
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
    """Settings of an engine.

    Attributes:
        model_path: Hugging Face checkpoint folder; its weights are version 0.
        dtype: dtype of computation; weights of other types are converted when they are loaded.
        max_model_len: most tokens of prompt and response together; 0: the model's context.
        max_num_seqs: most responses generated side by side.
        kv_cache_bytes: memory for keys and values; 0: CPU_KV_CACHE on the CPU, and on a GPU what
            gpu_memory_utilization leaves.
        gpu_memory_utilization: part of each GPU's memory for weights, activations, keys and values.
        logprobs_mode: which log-probs vLLM reports; see `rl_rollout_vllm.sampling`.
        max_logprobs: largest top_k of requests for kept sets.
        enforce_eager: use neither compilation nor CUDA graphs.
        prefix_caching: keep keys and values of prompts for later requests, until the next update.
        bucket_bytes: most bytes of weights sent at once; a larger tensor is sent alone.
        threads: compute threads of each process of the engine, on CPU.
        tokenizer: load the tokenizer of the model folder, which requests with stop strings need.
        tensor_parallel_size: processes, or GPUs, per layer. Each gets all weights of an update and
            keeps its shard.
        sleep_mode: let vLLM allocate GPU memory so that `sleep` can give it back; not needed on
            CPU.
        adapter: adapters to reserve memory for; None: none.
        start_timeout_s: longest start.
        call_timeout_s: longest update of the weights, and longest wait of a request for admission.

    Raises:
        ConfigError: a value is out of range; names the setting.
    """

    model_path: str
    dtype: Precision = "float32"
    max_model_len: int = 0
    max_num_seqs: int = 256
    kv_cache_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    logprobs_mode: LogprobsMode = "processed_logprobs"
    max_logprobs: int = 20
    enforce_eager: bool = True
    prefix_caching: bool = True
    bucket_bytes: int = 64 << 20
    threads: int = 1
    tokenizer: bool = False
    tensor_parallel_size: int = 1
    sleep_mode: bool = False
    adapter: AdapterConfig | None = None
    start_timeout_s: float = 600.0
    call_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _require(bool(self.model_path), "model_path", "a folder", self.model_path)
        for name, kind in (("dtype", Precision), ("logprobs_mode", LogprobsMode)):
            values, value = get_args(kind), getattr(self, name)
            _require(value in values, name, f"one of {', '.join(values)}", value)
        for name in ("max_model_len", "kv_cache_bytes", "max_logprobs"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        utilization = self.gpu_memory_utilization
        _require(0 < utilization <= 1, "gpu_memory_utilization", "in (0, 1]", utilization)
        for name in ("max_num_seqs", "bucket_bytes", "threads", "tensor_parallel_size"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("start_timeout_s", "call_timeout_s"):
            _require(getattr(self, name) > 0, name, "greater than 0", getattr(self, name))


PLUGIN = "rl_rollout_vllm"
"""Name of the entry point of `vllm_worker/plugin.py`, by which VLLM_PLUGINS selects it."""

CLIENT_VARIABLE = "RL_ROLLOUT_VLLM_CLIENT"
"""Environment variable: id of the process that starts an engine. Without it the plugin does
nothing, so that a vLLM started by another program is left alone."""


def environment(config: VLLMConfig, device: Device) -> dict[str, str]:
    """Return the environment variables to set before vLLM is imported.

    They apply to this process and to the engine's processes, which inherit them.
    """
    common = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.start_timeout_s)),  # vLLM's own limit is 600 s
    }
    if device == "cuda":
        return common
    cpu = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # saves a process: the worker runs in the engine's
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines bind to the same first cores
        "OMP_NUM_THREADS": str(config.threads),
        # keep freed memory: updates prepack all weights, and page faults would take half the time
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 60),
    }
    if config.enforce_eager:
        # else the first log-probs are compiled nevertheless, which needs a C++ compiler
        cpu["TORCHDYNAMO_DISABLE"] = "1"
    return common | cpu


def _require(fine: bool, name: str, wanted: str, got: object) -> None:
    if not fine:
        raise ConfigError(f"vLLM engine: {name} must be {wanted}; got {got!r}.", field=name)
