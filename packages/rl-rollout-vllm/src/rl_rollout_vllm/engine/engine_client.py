"""EngineClient: what a rollout engine needs of vLLM. Tests replace it by a table of logits."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rl_rollout_vllm.engine.partial_generation import Finish
from rl_rollout_vllm.engine.placed_images import PlacedImage
from rl_rollout_vllm.sampling import SamplingArguments

MemoryPart = Literal["weights", "kv_cache"]
"""A part of an engine's memory that can be woken separately."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one request that vLLM returned together.

    Attributes:
        token_ids: their ids.
        log_probs: their log-probabilities.
        finish_reason: set in the last chunk of a request.
        kept_ids: the tokens from which each was sampled; empty: not asked for.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Finish | None
    kept_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that the workers hold.

    Attributes:
        name: unique per version, so that cached prefixes of one adapter are not used for another.
        number: its id in vLLM.
    """

    name: str
    number: int


class EngineClient(Protocol):
    """Calls of vLLM's engine. All of them are made on one event loop."""

    def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        arguments: SamplingArguments,
        adapter: LoadedAdapter | None,
        images: Sequence[PlacedImage],
        *,
        stream: bool,
    ) -> AsyncGenerator[TokenChunk]:
        """Yield the tokens of a request as they come or all at once; the last has a reason."""
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests; their last chunk has the tokens generated so far."""
        ...

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Schedule nothing until `resume`; abort requests and empty caches, or keep both."""
        ...

    async def resume(self) -> None:
        """Schedule requests again."""
        ...

    async def reset_caches(self) -> None:
        """Drop everything that was computed with the old weights."""
        ...

    @property
    def sleep_levels(self) -> Sequence[int]:
        """Levels that give memory back: 1 keeps the weights in host memory, 2 drops them."""
        ...

    async def sleep(self, level: int) -> int | None:
        """Give memory back, while nothing is scheduled. Keys and values are dropped.

        Returns:
            Bytes given back in all workers; None: vLLM does not say.
        """
        ...

    async def wake(self, part: MemoryPart) -> None:
        """Allocate the memory of one part again."""
        ...

    async def call(self, method: str, *arguments: object) -> list[object]:
        """Call a method of the worker extension in every worker; plain values only."""
        ...

    async def close(self) -> None:
        """End the engine's process."""
        ...
