"""vLLM's asynchronous engine behind the few calls that are made of it. Here alone is vLLM's front imported, and only when one starts."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from rl_protocol.errors import ConfigError, RLError, RolloutError
from rl_rollout_vllm.availability import VLLMCapabilities, require_vllm
from rl_rollout_vllm.checkpoint import Checkpoint
from rl_rollout_vllm.config import VLLMConfig, environment
from rl_rollout_vllm.errors import EngineDiedError
from rl_rollout_vllm.ranges import Finish
from rl_rollout_vllm.sampling import SamplingArguments

Part = Literal["weights", "kv_cache"]
"""What of an engine's memory sleeps and wakes by itself."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPU can do; it starts with others, too, and dies of the first request."""

_BATCHED_TOKENS = 4096
"""Tokens of one step where prompts can't be computed in parts; more when one prompt may be longer."""

_CONTEXT_TIMEOUT_S = 10.0
"""Longest wait for vLLM's ZeroMQ context to end."""

WORKER_EXTENSION = "rl_rollout_vllm.worker.WeightUpdates"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request that came together."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Finish | None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter the engine holds, under a name that no other version has: prefixes cached with one are not taken for another's."""

    name: str
    number: int


class Front(Protocol):
    """What a rollout engine needs of vLLM. All calls are made on one event loop."""

    def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        arguments: SamplingArguments,
        adapter: LoadedAdapter | None,
        *,
        stream: bool,
    ) -> AsyncGenerator[Piece]:
        """The tokens of one request as they come, or all in one piece; the last piece has a finish reason."""
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests; what they have so far is their last piece."""
        ...

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Schedule nothing until `resume`; requests are aborted and caches emptied, or requests are kept."""
        ...

    async def resume(self) -> None:
        """Schedule again."""
        ...

    async def reset_caches(self) -> None:
        """Forget what was computed with the weights so far."""
        ...

    @property
    def sleep_levels(self) -> Sequence[int]:
        """Those that give memory back: 1 keeps the weights in host memory, 2 gives them up; both forget keys and values."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back, while nothing is scheduled."""
        ...

    async def wake(self, part: Part) -> None:
        """Have memory again for one part."""
        ...

    async def call(self, method: str, *arguments: object) -> list[object]:
        """Call a method of the worker extension in every worker; plain values only."""
        ...

    async def close(self) -> None:
        """End the engine's process."""
        ...


async def start_vllm(config: VLLMConfig, model: Checkpoint) -> Front:
    """Start an engine: environment, import, process. Must run on the loop it is used from.

    Raises:
        VLLMUnavailableError: see `require_vllm`.
        ConfigError: vLLM refuses the model or a setting.
        RolloutError: the engine did not come up.
    """
    capabilities = require_vllm()
    if capabilities.device == "cpu" and model.head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"{model.path} has attention heads of size {model.head_size}; vLLM on CPU serves {', '.join(map(str, CPU_HEAD_SIZES))}."
        )
    for name, value in environment(config, capabilities.device).items():
        os.environ.setdefault(name, value)
    front = _start(config, model, capabilities)  # blocks its loop, which is nobody else's
    await front.call("rollout_end_with_parent", os.getpid())
    await front.call("rollout_unlink_shared_memory")
    return front


def engine_arguments(config: VLLMConfig, model: Checkpoint, capabilities: VLLMCapabilities) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs."""
    adapter = config.adapter
    lora = {} if adapter is None else {"enable_lora": True, "max_lora_rank": adapter.rank, "max_loras": 1}
    context = config.max_model_len or model.context
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, _BATCHED_TOKENS)}
    return {
        "model": str(model.path),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.dtype,
        "max_model_len": context,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "logprobs_mode": config.logprobs_mode,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.prefix_caching,
        "worker_extension_cls": WORKER_EXTENSION,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_sleep_mode": config.sleep_mode and capabilities.sleep_frees_memory,
        "disable_log_stats": True,
        **({} if capabilities.chunked_prefill_with_seeds else whole_prompts),
        **lora,
    }


def _start(config: VLLMConfig, model: Checkpoint, capabilities: VLLMCapabilities) -> Front:
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    levels = () if capabilities.sleep_frees_memory and not config.sleep_mode else capabilities.sleep_levels
    try:
        arguments = AsyncEngineArgs(**engine_arguments(config, model, capabilities))
        # The engine has no name here: something that is imported above keeps this frame, and what it names, for good.
        return VLLMFront(
            AsyncLLM.from_engine_args(arguments), config.call_timeout_s, levels, sleeps=capabilities.sleep_frees_memory
        )
    except (ValueError, NotImplementedError, OSError) as error:
        raise ConfigError(f"vLLM can't serve {model.path} with these settings: {error}") from error
    except RuntimeError as error:  # the engine's process says why in its own output
        raise RolloutError(f"The vLLM engine for {model.path} did not start: {error}") from error


class VLLMFront:
    """Front over an AsyncLLM; `sleeps`: vLLM's own sleep gives memory back."""

    def __init__(self, engine: Any, timeout_s: float, sleep_levels: Sequence[int], *, sleeps: bool) -> None:
        from psutil import NoSuchProcess  # vLLM's
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

        self._engine: Any = engine
        self._timeout_s = timeout_s
        self._sleep_levels = sleep_levels
        self._sleeps = sleeps
        self._sampling_params: Any = SamplingParams
        self._lora_request: Any = LoRARequest
        self._kinds: Any = RequestOutputKind
        self._dead: type[Exception] = EngineDeadError
        self._gone: type[Exception] = NoSuchProcess

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        arguments: SamplingArguments,
        adapter: LoadedAdapter | None,
        *,
        stream: bool,
    ) -> AsyncGenerator[Piece]:
        """See Front.generate."""
        kind = self._kinds.DELTA if stream else self._kinds.FINAL_ONLY
        # the path is not read: the adapter is in the worker already
        lora = None if adapter is None else self._lora_request(adapter.name, adapter.number, "in-memory")
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": list(prompt_ids)},
                self._sampling_params(**arguments, output_kind=kind),
                request_id,
                lora_request=lora,
            ):
                yield _piece(output.outputs[0])
        except self._dead as error:
            raise self._died() from error

    async def abort(self, request_ids: Collection[str]) -> None:
        """See Front.abort."""
        await self._engine.abort(list(request_ids))

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """See Front.pause."""
        await self._within(self._engine.pause_generation(mode=mode, clear_cache=mode == "abort"))

    async def resume(self) -> None:
        """See Front.resume."""
        await self._within(self._engine.resume_generation())

    async def reset_caches(self) -> None:
        """See Front.reset_caches."""
        if not await self._within(self._engine.reset_prefix_cache()):
            raise RolloutError("vLLM did not empty its prefix cache: requests still use it.")
        await self._within(self._engine.reset_encoder_cache())

    @property
    def sleep_levels(self) -> Sequence[int]:
        """See Front.sleep_levels."""
        return self._sleep_levels

    async def sleep(self, level: int) -> None:
        """See Front.sleep."""
        if self._sleeps:
            await self._within(self._engine.sleep(level, mode="abort"))
        else:  # the weights are in host memory as it is
            await self.call("rollout_release_kv_cache")

    async def wake(self, part: Part) -> None:
        """See Front.wake."""
        if self._sleeps:
            await self._within(self._engine.wake_up([part]))

    async def call(self, method: str, *arguments: object) -> list[object]:
        """See Front.call."""
        try:
            answers = await self._within(self._engine.collective_rpc(method, self._timeout_s, arguments))
        except RLError:
            raise
        except Exception as error:  # vLLM says with a bare Exception that a worker's method failed
            raise RolloutError(f"{method} failed in the vLLM engine's process: {error}") from error
        return cast("list[object]", answers)

    async def close(self) -> None:
        """See Front.close."""
        engine, self._engine = self._engine, None  # its finaliser wants modules that are gone when the interpreter ends
        resources = engine.engine_core.resources
        try:
            await asyncio.to_thread(engine.shutdown)
        except self._gone:  # vLLM kills what takes its time, and wonders when that has just ended by itself
            await asyncio.to_thread(resources)  # what it did not come to: it asks this loop to close its sockets
        await _terminated(resources.ctx)

    async def _within(self, work: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except self._dead as error:
            raise self._died() from error
        except TimeoutError as error:
            raise RolloutError(
                f"The vLLM engine did not answer within {self._timeout_s:g} s (call_timeout_s)."
            ) from error

    def _died(self) -> EngineDiedError:
        return EngineDiedError(
            "The process of the vLLM engine is gone; its last words are in this process's error output. Start a new engine."
        )


async def _terminated(context: Any) -> None:
    """End vLLM's ZeroMQ context, its I/O threads and file descriptors, which vLLM leaves to the garbage collector.

    That waits for the context's sockets, which this loop closes meanwhile. Should one stay open, the context lives until the process ends: a
    daemon thread holds up nobody.
    """
    ending = threading.Thread(target=context.term, name="rl-rollout-vllm-zmq", daemon=True)
    ending.start()
    await asyncio.to_thread(ending.join, _CONTEXT_TIMEOUT_S)
    if ending.is_alive():
        _log.warning("vLLM has not closed all of its sockets within %g s; their threads live on.", _CONTEXT_TIMEOUT_S)


def _piece(output: Any) -> Piece:
    tokens = tuple(output.token_ids)
    log_probs = tuple(float(at[token].logprob) for at, token in zip(output.logprobs or (), tokens, strict=True))
    reason = output.finish_reason
    if reason not in (None, "stop", "length", "abort"):
        raise RolloutError(f"vLLM ended a request with the reason {reason!r}.")
    return Piece(tokens, log_probs, reason)
