"""vLLM as a rollout engine. vLLM and torch are imported when an engine starts, not before."""

from rl_rollout_vllm.availability import SUPPORTED, VLLMCapabilities, require_vllm
from rl_rollout_vllm.config import CPU_KV_CACHE, RANKS, AdapterConfig, VLLMConfig
from rl_rollout_vllm.engine.partial_generation import OnUpdate, TokenRange, continued
from rl_rollout_vllm.engine.rollout_engine import VLLMRolloutEngine
from rl_rollout_vllm.errors import EngineDiedError, TornWeightsError, VLLMUnavailableError
from rl_rollout_vllm.sampling import (
    LogprobsMode,
    SamplingArguments,
    request_seed,
    required_logprobs_mode,
    sampling_arguments,
)
from rl_rollout_vllm.weights.checkpoint import require_shards

__version__ = "0.1.0"

__all__ = [
    "CPU_KV_CACHE",
    "RANKS",
    "SUPPORTED",
    "AdapterConfig",
    "EngineDiedError",
    "LogprobsMode",
    "OnUpdate",
    "SamplingArguments",
    "TokenRange",
    "TornWeightsError",
    "VLLMCapabilities",
    "VLLMConfig",
    "VLLMRolloutEngine",
    "VLLMUnavailableError",
    "continued",
    "request_seed",
    "require_shards",
    "require_vllm",
    "required_logprobs_mode",
    "sampling_arguments",
]
