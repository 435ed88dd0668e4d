"""vLLM as a rollout engine. Importing it loads neither vLLM nor torch: an engine does, when it starts."""

from rl_rollout_vllm.availability import SUPPORTED, VLLMCapabilities, require_vllm
from rl_rollout_vllm.checkpoint import require_shards
from rl_rollout_vllm.config import RANKS, AdapterConfig, VLLMConfig
from rl_rollout_vllm.engine import VLLMRolloutEngine
from rl_rollout_vllm.errors import EngineDiedError, TornWeightsError, VLLMUnavailableError
from rl_rollout_vllm.ranges import OnUpdate, TokenRange, continued
from rl_rollout_vllm.sampling import (
    LogprobsMode,
    SamplingArguments,
    request_seed,
    required_logprobs_mode,
    sampling_arguments,
)

__version__ = "0.1.0"

__all__ = [
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
