"""Starts vLLM: environment, arguments, process."""

from __future__ import annotations

import os
from typing import Any

from rl_protocol.errors import ConfigError, RolloutError
from rl_rollout_vllm.availability import VLLMCapabilities, require_vllm
from rl_rollout_vllm.config import CLIENT_VARIABLE, CPU_KV_CACHE, PLUGIN, VLLMConfig, environment
from rl_rollout_vllm.engine.engine_client import EngineClient
from rl_rollout_vllm.weights.checkpoint import Checkpoint

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPU; with others it starts, and dies of the first request."""

WORKER_EXTENSION = "rl_rollout_vllm.vllm_worker.extension.WorkerExtension"

_BATCHED_TOKENS = 4096
"""Tokens per step if prompts can't be computed in parts; raised to the length of one prompt."""


async def start_vllm(config: VLLMConfig, model: Checkpoint) -> EngineClient:
    """Start an engine. Call it on the loop from which the engine is used; it blocks this loop.

    Raises:
        VLLMUnavailableError: vLLM is missing or of another version.
        ConfigError: vLLM refuses the model or a setting.
        RolloutError: the engine did not start.
    """
    capabilities = require_vllm()
    if capabilities.device == "cpu" and model.head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"{model.path} has attention heads of size {model.head_size}; vLLM on CPU supports "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}."
        )
    for name, value in environment(config, capabilities.device).items():
        os.environ.setdefault(name, value)
    _load_plugin()
    client = _start(config, model, capabilities)
    await client.call("rollout_unlink_shared_memory")
    return client


def _load_plugin() -> None:
    """Have the engine's processes load the plugin that ends them with this process."""
    os.environ[CLIENT_VARIABLE] = str(os.getpid())
    selected = os.environ.get("VLLM_PLUGINS")
    if selected is not None and PLUGIN not in selected.split(","):
        os.environ["VLLM_PLUGINS"] = f"{selected},{PLUGIN}"


def engine_arguments(config: VLLMConfig, model: Checkpoint, capabilities: VLLMCapabilities) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's AsyncEngineArgs."""
    adapter = config.adapter
    lora = {} if adapter is None else {"enable_lora": True, "max_lora_rank": adapter.rank, "max_loras": 1}
    context = config.max_model_len or model.context
    gpu = capabilities.device == "cuda"
    memory, cache = dict[str, Any](), config.kv_cache_bytes or (0 if gpu else CPU_KV_CACHE)
    if cache:
        memory["kv_cache_memory_bytes"] = cache
    if gpu:  # that part must be free at the start also where the cache has a size of its own
        memory["gpu_memory_utilization"] = config.gpu_memory_utilization
    # the trainer normalizes patches; vLLM's own processor starts all the same and reads a tokenizer
    sight = {
        "skip_tokenizer_init": False,
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": not gpu,
    }
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, _BATCHED_TOKENS)}
    return {
        "model": str(model.path),
        "skip_tokenizer_init": not config.tokenizer,
        "generation_config": "vllm",
        "dtype": config.dtype,
        "max_model_len": context,
        "max_num_seqs": config.max_num_seqs,
        **memory,
        "logprobs_mode": config.logprobs_mode,
        "max_logprobs": config.max_logprobs,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.prefix_caching,
        "worker_extension_cls": WORKER_EXTENSION,
        "tensor_parallel_size": config.tensor_parallel_size,
        # not Ray's, which vLLM takes in an actor of a placement group, as on several hosts
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
        "enable_sleep_mode": config.sleep_mode and capabilities.sleep_frees_memory,
        "disable_log_stats": True,
        **({} if model.vision is None else sight),
        **({} if capabilities.chunked_prefill_with_seeds else whole_prompts),
        **lora,
    }


def _start(config: VLLMConfig, model: Checkpoint, capabilities: VLLMCapabilities) -> EngineClient:
    # imports vLLM, which reads the environment
    from rl_rollout_vllm.engine.vllm_client import VLLMClient

    arguments = engine_arguments(config, model, capabilities)
    levels = () if capabilities.sleep_frees_memory and not config.sleep_mode else capabilities.sleep_levels
    try:
        return VLLMClient.start(arguments, config.call_timeout_s, levels, vllm_sleeps=capabilities.sleep_frees_memory)
    except (ValueError, NotImplementedError, OSError) as error:
        raise ConfigError(f"vLLM can't serve {model.path} with these settings: {error}") from error
    except RuntimeError as error:  # the engine's process prints the reason
        raise RolloutError(f"The vLLM engine for {model.path} did not start: {error}") from error
