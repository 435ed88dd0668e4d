"""vLLM as a rollout engine: what can be said without importing vLLM. The engine itself is not part of this version."""

from rl_rollout_vllm.availability import SUPPORTED, VLLMCapabilities, require_vllm
from rl_rollout_vllm.errors import VLLMUnavailableError
from rl_rollout_vllm.sampling import (
    LogprobsMode,
    SamplingArguments,
    request_seed,
    required_logprobs_mode,
    sampling_arguments,
)

__version__ = "0.1.0"

__all__ = [
    "SUPPORTED",
    "LogprobsMode",
    "SamplingArguments",
    "VLLMCapabilities",
    "VLLMUnavailableError",
    "request_seed",
    "require_vllm",
    "required_logprobs_mode",
    "sampling_arguments",
]
