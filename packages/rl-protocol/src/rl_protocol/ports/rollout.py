"""The RolloutEngine port: requests, sampling parameters and generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from rl_protocol.batch.kept_sets import KeptSets
from rl_protocol.batch.routed_experts import ExpertIds
from rl_protocol.errors import ConfigError
from rl_protocol.ports.weights import WeightReceiver


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a rollout."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    ignore_eos: bool = False
    """The end-of-sequence token does not end a response."""
    stop: tuple[str, ...] = ()
    """A response ends with the token that completes one of these strings first, in its text without
    special tokens. That token is the last one of the response. None of the strings is empty."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these tokens, besides the end-of-sequence token."""
    seed: int = 0
    """Seed of the run; the random stream of a request is derived from (seed, uid, session)."""
    kept_sets: bool = False
    """Report the tokens that top-p and top-k keep, and log-probs over these."""

    routed_experts: bool = False
    """Report the experts that computed each token of prompt and response."""

    @property
    def reports_kept_sets(self) -> bool:
        """Whether a response has `kept`: that is asked for, and top-p or top-k exclude tokens."""
        return self.kept_sets and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ConfigError(f"Sampling parameter stop must have no empty strings; got {self.stop!r}.", field="stop")


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image of a prompt, as patches made by the model's image processor."""

    pixel_values: npt.NDArray[np.float32]
    """[patches, values per patch]."""
    grid_thw: tuple[int, int, int]
    """Number of patches in time (1), height and width; their product is the number of patches."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for one response."""

    uid: str
    session: int
    prompt_ids: tuple[int, ...]
    """[P] token ids, P >= 1, with the model's image token in place of each image patch."""
    images: tuple[ImageInput, ...] = ()
    """In the order of the prompt."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One generated response."""

    response_ids: tuple[int, ...]
    """[R] token ids as sampled, including the token that ended the response: end of sequence, a
    stop token, or the one that completed a stop string."""
    log_probs: tuple[float, ...]
    """[R] natural log-probability of each token under softmax(logits / temperature), before top-p
    and top-k; with `kept`, over the kept tokens.

    Greedy decoding uses temperature 1 here."""
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: int
    kept: KeptSets | None = None
    """[R] the tokens from which each token was sampled; None unless
    `SamplingParams.reports_kept_sets`."""
    routed: ExpertIds | None = None
    """[P + R - 1, layers, K] the experts of each token that the model computed, which is all but
    the last one; None unless `SamplingParams.routed_experts`, and if R is 0."""


@runtime_checkable
class RolloutEngine(WeightReceiver, Protocol):
    """Generates token ids from token ids."""

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """Return one generation per request, in order. The result does not depend on how requests
        are batched. Cancelling the call ends its requests.

        Raises:
            RolloutError: names a request that can't be served (empty or too long prompt,
                unsupported images).
            ConfigError: the engine can't serve the parameters, such as `stop` without a tokenizer.
        """
        ...
