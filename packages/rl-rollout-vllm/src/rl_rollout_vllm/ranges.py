"""A response in the ranges that updates of the weights cut it into, and what is asked for after one. Pure: vLLM is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rl_protocol.ports import GenerationRequest, SamplingParams

Finish = Literal["stop", "length", "abort"]
OnUpdate = Literal["abort", "continue"]
"""What an update of the weights does to a response that it cuts short: end it, or have the new weights go on with it."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens of one response that one version of the weights made.

    Attributes:
        token_ids: [T] their ids.
        log_probs: [T] as of `Generation.log_probs`.
        weight_version: the version that made them.
        finish_reason: set in the last range of a response.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_version: int
    finish_reason: Finish | None


def continued(
    request: GenerationRequest, params: SamplingParams, so_far: Sequence[int]
) -> tuple[GenerationRequest, SamplingParams] | None:
    """What to ask for after an abort: the response so far becomes part of the prompt and counts against the budget of the whole response.

    None: the budget is used up.
    """
    left = params.max_new_tokens - len(so_far)
    if left <= 0:
        return None
    return (
        msgspec.structs.replace(request, prompt_ids=(*request.prompt_ids, *so_far)),
        msgspec.structs.replace(params, max_new_tokens=left),
    )
