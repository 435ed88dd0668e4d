"""EngineClient over vLLM's AsyncLLM. Imports vLLM: import this module only to start an engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from psutil import NoSuchProcess  # a dependency of vLLM
from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
from vllm.inputs.engine import mm_input  # pyright: ignore[reportMissingImports]
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

from rl_protocol.errors import RLError, RolloutError
from rl_rollout_vllm.engine.engine_client import LoadedAdapter, MemoryPart, TokenChunk
from rl_rollout_vllm.engine.placed_images import PlacedImage
from rl_rollout_vllm.engine.zmq_shutdown import terminate_context
from rl_rollout_vllm.errors import EngineDiedError
from rl_rollout_vllm.sampling import SamplingArguments


class VLLMClient:
    """EngineClient over an AsyncLLM.

    Args:
        engine: the AsyncLLM.
        timeout_s: longest wait for an answer.
        sleep_levels: levels that `sleep` supports.
        vllm_sleeps: vLLM's own sleep gives memory back; otherwise a worker method does.
    """

    def __init__(self, engine: Any, timeout_s: float, sleep_levels: Sequence[int], *, vllm_sleeps: bool) -> None:
        self._engine: Any = engine
        self._timeout_s = timeout_s
        self._sleep_levels = sleep_levels
        self._vllm_sleeps = vllm_sleeps

    @classmethod
    def start(
        cls, arguments: Mapping[str, Any], timeout_s: float, sleep_levels: Sequence[int], *, vllm_sleeps: bool
    ) -> VLLMClient:
        """Start the engine's process with these arguments of AsyncEngineArgs."""
        # no local name for the engine: vLLM references this frame and would keep it alive
        return cls(
            AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), timeout_s, sleep_levels, vllm_sleeps=vllm_sleeps
        )

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        arguments: SamplingArguments,
        adapter: LoadedAdapter | None,
        images: Sequence[PlacedImage],
        *,
        stream: bool,
    ) -> AsyncGenerator[TokenChunk]:
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        # the path is not read: the worker holds the adapter already
        lora = None if adapter is None else LoRARequest(adapter.name, adapter.number, "in-memory")
        try:
            async for output in self._engine.generate(
                _with_images(prompt_ids, images) if images else {"prompt_token_ids": list(prompt_ids)},
                SamplingParams(**arguments, output_kind=kind),
                request_id,
                lora_request=lora,
            ):
                yield _chunk(output.outputs[0], kept=arguments["logprobs"] > 0)
        except EngineDeadError as error:
            raise _died() from error

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._engine.abort(list(request_ids))

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        await self._within(self._engine.pause_generation(mode=mode, clear_cache=mode == "abort"))

    async def resume(self) -> None:
        await self._within(self._engine.resume_generation())

    async def reset_caches(self) -> None:
        if not await self._within(self._engine.reset_prefix_cache()):
            raise RolloutError("vLLM did not empty its prefix cache: requests still use it.")
        await self._within(self._engine.reset_encoder_cache())

    @property
    def sleep_levels(self) -> Sequence[int]:
        return self._sleep_levels

    async def sleep(self, level: int) -> int | None:
        if self._vllm_sleeps:
            await self._within(self._engine.sleep(level, mode="abort"))
            return None
        # the weights are in host memory anyway
        return sum(cast("list[int]", await self.call("rollout_release_kv_cache")))

    async def wake(self, part: MemoryPart) -> None:
        if self._vllm_sleeps:
            await self._within(self._engine.wake_up([part]))

    async def call(self, method: str, *arguments: object) -> list[object]:
        try:
            answers = await self._within(self._engine.collective_rpc(method, self._timeout_s, arguments))
        except RLError:
            raise
        except Exception as error:  # vLLM raises a bare Exception if a worker's method fails
            raise RolloutError(f"{method} failed in the vLLM engine's process: {error}") from error
        return cast("list[object]", answers)

    async def close(self) -> None:
        engine, self._engine = self._engine, None  # its finalizer fails at interpreter exit
        resources = engine.engine_core.resources
        await _stop_reading(engine)
        try:
            await asyncio.to_thread(engine.shutdown)
        except NoSuchProcess:  # vLLM raises it if a worker exits while being killed
            await asyncio.to_thread(resources)  # the rest of shutdown
        await terminate_context(resources.ctx)

    async def _within(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await a call of the engine until the deadline or the end of its process.

        vLLM answers calls in flight no more if the process ends, but it stops reading its output.
        """
        call, reader = asyncio.ensure_future(work), self._engine.output_handler
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait([call, *filter(None, [reader])], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise _died()
            return call.result()
        except EngineDeadError as error:
            raise _died() from error
        except TimeoutError as error:
            raise RolloutError(
                f"The vLLM engine did not answer within {self._timeout_s:g} s (call_timeout_s)."
            ) from error
        finally:
            call.cancel()


async def _stop_reading(engine: Any) -> None:
    """End the task that reads the answers of the engine's process; pending requests fail.

    While it reads, it logs the end of that process as an error, with a traceback.
    """
    if (reader := engine.output_handler) is not None:
        reader.cancel()
        await asyncio.wait([reader])
        engine.output_processor.propagate_error(EngineDeadError())


def _died() -> EngineDiedError:
    return EngineDiedError(
        "The process of the vLLM engine is gone; see this process's stderr for its traceback. Start a new engine."
    )


def _with_images(prompt_ids: Sequence[int], images: Sequence[PlacedImage]) -> Any:
    """The prompt as vLLM's own processor of images would give it, with the trainer's patches."""
    grids = torch.tensor([one.image.grid_thw for one in images])
    patches = torch.cat([torch.from_numpy(one.image.pixel_values) for one in images])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return mm_input(
        list(prompt_ids),
        MultiModalKwargsItems.from_hf_inputs({"pixel_values": patches, "image_grid_thw": grids}, fields),
        {"image": [one.digest for one in images]},
        {"image": [PlaceholderRange(offset=one.offset, length=one.length) for one in images]},
    )


def _chunk(output: Any, *, kept: bool) -> TokenChunk:
    tokens = tuple(output.token_ids)
    places = [{token: float(one.logprob) for token, one in at.items()} for at in output.logprobs or ()]
    log_probs = tuple(at[token] for at, token in zip(places, tokens, strict=True))
    reason = output.finish_reason
    if reason not in (None, "stop", "length", "abort"):
        raise RolloutError(f"vLLM ended a request with the unknown reason {reason!r}.")
    if not kept:
        return TokenChunk(tokens, log_probs, reason)
    sets = [{token: value for token, value in at.items() if value > -math.inf} for at in places]
    # of tokens that tie with the last of top_k, vLLM keeps all and reports some
    masses = [math.log(math.fsum(map(math.exp, one.values()))) for one in sets]
    over_sets = tuple(value - mass for value, mass in zip(log_probs, masses, strict=True))
    return TokenChunk(tokens, over_sets, reason, tuple(map(tuple, sets)))
