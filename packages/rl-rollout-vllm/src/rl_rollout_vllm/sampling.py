"""Translate sampling parameters of rl_protocol into those of vLLM.

SamplingParams    vllm.SamplingParams
max_new_tokens    max_tokens
temperature       temperature       0 is greedy in both; values between 0 and 0.01, which vLLM
                                    raises to 0.01, and above 2, which it refuses, are refused
top_p             top_p
top_k             top_k             0 means all in both
ignore_eos        ignore_eos
seed              seed              derived per request from (seed, uid, session, prompt length)
stop              stop              with the text that vLLM makes if there are any: detokenize
stop_token_ids    stop_token_ids    and the model's end-of-sequence tokens
-                 n=1               each of n samples is a request with its own session
-                 logprobs          0: log-probability of the sampled token only; top_k where kept
                                    sets are asked for: also those of the kept tokens
-                 detokenize        only for stop strings: else only token ids are needed
-                 logit_bias        the least there is, for tokens that stand for images and videos
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, TypedDict

from rl_protocol.errors import ConfigError, RolloutError
from rl_protocol.ports import GenerationRequest, SamplingParams

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Values of vLLM's engine argument `logprobs_mode`."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises smaller positive temperatures to the first, and refuses those above the second."""


_NEVER = -100.0
"""The least bias of a logit that vLLM takes; 3.7e-44 of the probability remains."""


class SamplingArguments(TypedDict):
    """Keyword arguments of `vllm.SamplingParams`."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    stop: list[str]
    stop_token_ids: list[int]
    logprobs: int
    detokenize: bool
    logit_bias: dict[int, float] | None


def sampling_arguments(
    request: GenerationRequest,
    params: SamplingParams,
    eos_ids: Sequence[int] = (),
    never_generated: Sequence[int] = (),
) -> SamplingArguments:
    """Return the keyword arguments for one request.

    Args:
        request: the request.
        params: sampling parameters.
        eos_ids: the model's end-of-sequence tokens.
        never_generated: tokens that no response has.

    Raises:
        ConfigError: a parameter is out of range; names it.
        RolloutError: the prompt is empty; names the request.
    """
    _check(params)
    if not request.prompt_ids:
        raise RolloutError(f"The prompt of request {request.uid!r}, session {request.session}, has no tokens.")
    return SamplingArguments(
        n=1,
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=request_seed(params.seed, request.uid, request.session, len(request.prompt_ids)),
        ignore_eos=params.ignore_eos,
        stop=list(params.stop),
        stop_token_ids=[*(() if params.ignore_eos else eos_ids), *params.stop_token_ids],
        logprobs=params.top_k if params.reports_kept_sets else 0,
        detokenize=bool(params.stop),
        logit_bias=dict.fromkeys(never_generated, _NEVER) if never_generated else None,
    )


def request_seed(seed: int, uid: str, session: int, position: int) -> int:
    """Return the seed of a request in 0..2**63-1, which does not depend on batching or arrival.

    `position` is the number of tokens before the first one to generate, so continued responses and
    later turns of a session draw from separate streams. The seed is the BLAKE2b hash of
    `seed/session/position/uid` (uid last, because it may contain the separator): its first 8 bytes
    read little-endian, without the top bit.
    """
    text = f"{seed}/{session}/{position}/{uid}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def required_logprobs_mode(params: SamplingParams) -> LogprobsMode | None:
    """Return the `logprobs_mode` that reports `Generation.log_probs`; None if both modes do.

    They are defined after temperature and before top-p and top-k. vLLM reports log-probs before all
    of these ("raw_logprobs", its default, which ignores temperature) or after all of them
    ("processed_logprobs"). Both report greedy requests at temperature 1. Where kept sets are asked
    for, they are defined after all of these.

    Raises:
        ConfigError: a parameter is out of range, or temperature is not 1 and top-p or top-k is set,
            which neither mode reports; or kept sets are asked for without top-k.
    """
    _check(params)
    if params.reports_kept_sets:
        if not params.top_k:
            raise ConfigError(
                f"vLLM reports the tokens that top_p {params.top_p} keeps among the top_k most probable ones, and top_k is 0: set it, or "
                "kept_sets=False.",
                field="top_k",
            )
        return "processed_logprobs"
    restricted = params.top_p < 1.0 or params.top_k > 0
    if params.temperature == 0.0 or (params.temperature == 1.0 and not restricted):
        return None
    if not restricted:
        return "processed_logprobs"
    if params.temperature == 1.0:
        return "raw_logprobs"
    raise ConfigError(
        f"vLLM can't report log-probs at temperature {params.temperature} before top_p {params.top_p} and top_k {params.top_k}: "
        "set temperature=1, or top_p=1 and top_k=0, or let the trainer compute the log-probs."
    )


def _check(params: SamplingParams) -> None:
    temperature = params.temperature
    checks = (
        ("max_new_tokens", params.max_new_tokens, ">= 1", params.max_new_tokens >= 1),
        (
            "temperature",
            temperature,
            f"0 or a number in {MIN_TEMPERATURE}..{MAX_TEMPERATURE:g}",
            temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE,
        ),
        ("top_p", params.top_p, "above 0 and at most 1", 0 < params.top_p <= 1),
        ("top_k", params.top_k, ">= 0 (0: all)", params.top_k >= 0),
    )
    for name, value, wanted, fine in checks:
        if not fine:
            raise ConfigError(f"Sampling parameter {name} must be {wanted}; got {value!r}.", field=name)
