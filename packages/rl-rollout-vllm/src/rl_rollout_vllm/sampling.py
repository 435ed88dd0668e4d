"""From the stack's sampling parameters to the keyword arguments of `vllm.SamplingParams`. Pure: vLLM is not imported.

ours              vLLM
max_new_tokens    max_tokens
temperature       temperature       0 is greedy in both; vLLM raises what lies between 0 and 0.01 to 0.01, we refuse it
top_p             top_p
top_k             top_k             0 is all in both
ignore_eos        ignore_eos
seed              seed              derived for each request from (seed, uid, session, tokens of the prompt)
-                 stop_token_ids    the model's end-of-sequence tokens, for vLLM runs without a tokenizer here
-                 n=1               the caller asks for each of its n samples by session
-                 logprobs=0        the sampled token's log-probability and no others
-                 detokenize=False  token ids are all that is asked for
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, TypedDict

from rl_protocol.errors import ConfigError, RolloutError
from rl_protocol.ports import GenerationRequest, SamplingParams

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""The engine argument `logprobs_mode` of vLLM."""

MIN_TEMPERATURE = 0.01
"""vLLM raises smaller positive temperatures to this one."""


class SamplingArguments(TypedDict):
    """Keyword arguments of `vllm.SamplingParams`."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    stop_token_ids: list[int]
    logprobs: int
    detokenize: bool


def sampling_arguments(
    request: GenerationRequest, params: SamplingParams, eos_ids: Sequence[int] = ()
) -> SamplingArguments:
    """Keyword arguments for one request; a response ends with the first of `eos_ids`.

    Raises:
        ConfigError: a parameter out of range; names it.
        RolloutError: an empty prompt; names the request.
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
        stop_token_ids=[] if params.ignore_eos else list(eos_ids),
        logprobs=0,
        detokenize=False,
    )


def request_seed(seed: int, uid: str, session: int, position: int) -> int:
    """Seed of one request in 0..2**63-1: the same wherever, whenever and beside whatever it is computed.

    `position` is the number of tokens before the first one to be generated: what is continued after an abort, and later turns of a
    session, draw from streams of their own. The BLAKE2b hash of `seed/session/position/uid` (uid last: it may hold the separator), its
    first 8 bytes read little-endian, top bit off.
    """
    text = f"{seed}/{session}/{position}/{uid}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def required_logprobs_mode(params: SamplingParams) -> LogprobsMode | None:
    """The `logprobs_mode` an engine must run with to report what `Generation.log_probs` promises under these parameters; None: either.

    vLLM reports log-probabilities either before everything ("raw_logprobs", its default: temperature is ignored) or after
    temperature, top-p and top-k ("processed_logprobs"). The promise is: after temperature, before top-p and top-k. Greedy requests are
    reported at temperature 1 by both.

    Raises:
        ConfigError: a temperature other than 1 together with top-p or top-k, which neither mode reports.
    """
    _check(params)
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
            "0 or a number >= 0.01",
            temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf,
        ),
        ("top_p", params.top_p, "above 0 and at most 1", 0 < params.top_p <= 1),
        ("top_k", params.top_k, ">= 0 (0: all)", params.top_k >= 0),
    )
    for name, value, wanted, fine in checks:
        if not fine:
            raise ConfigError(f"Sampling parameter {name} must be {wanted}; got {value!r}.", field=name)
