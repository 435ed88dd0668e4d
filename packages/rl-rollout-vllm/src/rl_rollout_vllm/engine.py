"""The rollout engine: the ports RolloutEngine, WeightReceiver and AdapterReceiver over vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from rl_protocol.errors import ConfigError, RLError, RolloutError
from rl_protocol.ports import Generation, GenerationRequest, SamplingParams
from rl_protocol.weights import WeightTensor
from rl_rollout_vllm.adapters import Adapter, read_adapter, with_config
from rl_rollout_vllm.buckets import Answer, Bucket, Buckets, checked, split
from rl_rollout_vllm.checkpoint import Checkpoint, read_checkpoint, read_json, require_shards
from rl_rollout_vllm.config import VLLMConfig
from rl_rollout_vllm.errors import EngineDiedError, TornWeightsError
from rl_rollout_vllm.front import Finish, Front, LoadedAdapter, Part, Piece, start_vllm
from rl_rollout_vllm.gate import Gate
from rl_rollout_vllm.loop import LoopThread
from rl_rollout_vllm.sampling import required_logprobs_mode, sampling_arguments

_ABORT_AGAIN_S = 0.05


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


class VLLMRolloutEngine:
    """RolloutEngine over a vLLM engine in a process of its own.

    Requests of one `generate` run side by side; several calls may, too. An update of the weights, or `pause`, aborts what runs:
    those responses come back with the tokens they have and the finish reason `abort`, and `continued` says how to ask for the rest. What
    arrives meanwhile waits until the new weights are in and verified. So one version made all tokens of a response.

    Lifecycle: the constructor starts the process and returns when it answers; `close` ends it. Calls may come from any thread and loop.

    Args:
        config: see VLLMConfig.
        start: how to get at vLLM; tests put something else in its place.

    Raises:
        VLLMUnavailableError: vLLM is missing or of another version.
        ConfigError: the folder, or a setting, does not fit.
        RolloutError: the engine did not start.
    """

    def __init__(
        self, config: VLLMConfig, *, start: Callable[[VLLMConfig, Checkpoint], Awaitable[Front]] = start_vllm
    ) -> None:
        self._config = config
        self._model = read_checkpoint(config.model_path)
        require_shards(read_json(self._model.path / "config.json"), config.tensor_parallel_size)
        if config.max_model_len > self._model.context:
            raise ConfigError(
                f"vLLM engine: max_model_len={config.max_model_len} is more than the context of {self._model.context} of {config.model_path}."
            )
        self._context = config.max_model_len or self._model.context
        self._version = 0
        self._closed = False
        self._adapter: tuple[Adapter, LoadedAdapter] | None = None
        self._numbers = itertools.count(1)
        self._running: set[str] = set()
        self._asleep: list[Part] = []
        self._buckets = Buckets(config.bucket_bytes)
        self._changing = asyncio.Lock()  # one pause, resume or update at a time
        self._loop = LoopThread("rl-rollout-vllm")
        try:
            self._front, self._gate, self._idle = self._loop.run(self._open(start), config.start_timeout_s)
        except BaseException:
            self._loop.close()
            raise

    # ------------------------------------------------------------------------------------------------------------ generation

    @property
    def weight_version(self) -> int:
        """Version of the active weights."""
        return self._version

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """See rl_protocol.ports.RolloutEngine.generate.

        Raises:
            RolloutError: names the request that can't be served; or nothing is admitted (see TornWeightsError), or EngineDiedError.
            ConfigError: parameters that vLLM, or this engine's logprobs_mode, can't serve.
        """
        self._check(requests, params)
        return await self._loop.call(self._generate(requests, params))

    async def stream(self, request: GenerationRequest, params: SamplingParams) -> AsyncGenerator[TokenRange]:
        """The tokens of one response as they are made; the last range has a finish reason. Errors as of `generate`."""
        self._check([request], params)
        ranges = _Pulled(self._ranges(request, params, stream=True))
        try:
            while (made := await self._loop.call(ranges.next())) is not None:
                yield made
        finally:
            await self._loop.call(ranges.close())

    def _check(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        mode = required_logprobs_mode(params)
        if mode not in (None, self._config.logprobs_mode):
            raise ConfigError(
                f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k} need an engine with logprobs_mode={mode!r}; "
                f"this one has {self._config.logprobs_mode!r}."
            )
        for request in requests:
            self._check_prompt(request, params.max_new_tokens)

    def _check_prompt(self, request: GenerationRequest, wanted: int) -> None:
        ids, name = request.prompt_ids, f"Request {request.uid!r}, session {request.session}"
        if not ids:
            raise RolloutError(f"{name}: the prompt has no tokens; every prompt needs at least one.")
        if request.images:
            raise RolloutError(f"{name}: it has images, which this engine does not take; set rollout.name=hf.")
        if len(ids) + wanted > self._context:
            raise RolloutError(
                f"{name}: the prompt has {len(ids)} tokens; with rollout.response_length={wanted} (max_new_tokens) that is "
                f"{len(ids) + wanted}, more than the engine's context of {self._context} (max_model_len)."
            )
        if not 0 <= min(ids) <= max(ids) < self._model.vocabulary:
            raise RolloutError(
                f"{name}: token ids must lie in 0..{self._model.vocabulary - 1}; got {min(ids)} to {max(ids)}."
            )

    async def _generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        tasks = [asyncio.ensure_future(self._one(request, params)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        async for made in self._ranges(request, params, stream=False):
            if made.finish_reason is not None:
                return Generation(
                    response_ids=made.token_ids,
                    log_probs=made.log_probs,
                    finish_reason=made.finish_reason,
                    weight_version=made.weight_version,
                )
        raise RolloutError(f"Request {request.uid!r}, session {request.session}: vLLM ended it without a reason.")

    async def _ranges(
        self, request: GenerationRequest, params: SamplingParams, *, stream: bool
    ) -> AsyncGenerator[TokenRange]:
        arguments = sampling_arguments(request, params, self._model.eos_ids)
        await self._gate.enter(self._config.call_timeout_s)
        number = f"{next(self._numbers)}"
        version, adapter = self._version, self._adapter  # nothing can change them before this request has ended
        self._running.add(number)
        self._idle.clear()
        pieces = self._front.generate(
            number, request.prompt_ids, arguments, None if adapter is None else adapter[1], stream=stream
        )
        try:
            async for piece in pieces:
                yield _range(piece, version)
        finally:
            await pieces.aclose()
            self._running.discard(number)
            if not self._running:
                self._idle.set()

    # ------------------------------------------------------------------------------------------------------------ control

    async def abort(self) -> None:
        """End all requests that run; they come back with what they have."""
        await self._loop.call(self._front.abort(tuple(self._running)))

    async def pause(self, mode: Literal["abort", "keep"] = "abort") -> None:
        """Admit nothing until `resume`. What runs is aborted, or kept as it is; an update of the weights aborts what was kept."""
        await self._loop.call(self._pause(mode))

    async def resume(self) -> None:
        """Admit requests, and go on with those that were kept; not before an update that runs is done, or one that broke off is mended."""
        await self._loop.call(self._unpause())

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Abort what runs, admit nothing, and give memory back until `wake`.

        Level 1 forgets keys and values, and keeps the weights in host memory; level 2 gives the weights up as well: they must be loaded
        again after `wake("weights")`, and nothing is generated before.

        Raises:
            ConfigError: a level that this engine can't do; nothing was changed.
            RolloutError: it sleeps already.
        """
        await self._loop.call(self._sleep(level))

    async def wake(self, part: Part | None = None) -> None:
        """Have one part of the memory again, or all of it: first the weights, so that new ones can be loaded, then room for keys and values.

        Raises:
            RolloutError: keys and values before the weights.
        """
        await self._loop.call(self._wake(part))

    def close(self) -> None:
        """End the engine's process; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._front.close(), self._config.call_timeout_s)
            self._loop.close()
            self._buckets.close()

    async def _pause(self, mode: Literal["abort", "keep"]) -> None:
        async with self._changing:
            self._gate.hold("pause", "the engine is paused, call resume")
            await self._front.pause(mode)
            if mode == "abort":
                await self._drain()

    async def _unpause(self) -> None:
        async with self._changing:
            await self._release("pause")

    async def _sleep(self, level: int) -> None:
        levels = self._front.sleep_levels
        if level not in levels:
            raise ConfigError(
                f"This vLLM engine can't sleep at level {level}; levels that give memory back here: {list(levels)}. On GPUs set "
                "VLLMConfig.sleep_mode; on CPU level 2 is not possible, for vLLM's weights are prepacked."
            )
        async with self._changing:
            if self._asleep:
                raise RolloutError("The vLLM engine sleeps already; call wake.")
            self._gate.hold("sleep", "the engine sleeps, call wake")
            await self._quiet()
            self._asleep = ["weights", "kv_cache"]
            if level == 2:
                self._gate.hold("weights", "sleep(2) has given the weights up, load them")
            await self._front.call("rollout_forget_buckets")
            self._buckets.close()
            await self._front.sleep(level)

    async def _wake(self, part: Part | None) -> None:
        async with self._changing:
            if part == "kv_cache" and "weights" in self._asleep:
                raise RolloutError("Wake the weights of the vLLM engine before its keys and values.")
            for one in tuple(self._asleep):
                if part in (None, one):
                    await self._front.wake(one)
                    self._asleep.remove(one)
            if not self._asleep:
                await self._release("sleep")

    async def _release(self, hold: str) -> None:
        """Give a hold up, once vLLM is ready for those who wait."""
        if self._gate.opens_without(hold):
            await self._front.resume()
        self._gate.release(hold)

    async def _drain(self) -> None:
        """Wait until nothing runs; a request that was on its way in while the others were aborted is aborted, too."""
        async with asyncio.timeout(self._config.call_timeout_s):
            while self._running:
                await self._front.abort(tuple(self._running))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_AGAIN_S):
                        await self._idle.wait()

    # ------------------------------------------------------------------------------------------------------------ weights

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        """See rl_protocol.ports.WeightReceiver.load_weights. Blocks until requests are admitted again.

        The weights are checked as a whole before the first byte is loaded. Then requests are aborted, buckets are loaded and their
        digests compared, adapters that vLLM drops on the way are loaded again, and caches are emptied.

        Raises:
            WeightSyncError: the weights do not fit; nothing was changed.
            TornWeightsError: loading broke off midway: nothing is generated until a later call succeeds.
            EngineDiedError: the engine's process is gone.
        """
        fitting = checked(weights, self._model, version)
        self._loop.run(self._update(lambda: self._load_all(fitting), version), self._config.call_timeout_s)

    def load_adapter(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Generate with this LoRA adapter, in place of the one before, from now on; the base weights stay as they are.

        Args:
            weights: tensors named as in a PEFT folder (`base_model.model.….lora_A.weight`).
            version: the version that adapter and base weights make together.

        Raises:
            WeightSyncError: the adapter does not fit config.adapter; nothing was changed.
            TornWeightsError: see `load_weights`.
        """
        self._take(with_config(weights, self._config.adapter), version)

    def load_adapter_folder(self, path: str | Path, version: int) -> None:
        """Generate with the adapter of an HF PEFT folder; see `load_adapter`.

        Raises:
            ConfigError: the folder can't be read.
        """
        self._take(read_adapter(Path(path), self._config.adapter), version)

    def _take(self, adapter: Adapter, version: int) -> None:
        loaded = LoadedAdapter(f"policy-v{version}", next(self._numbers))
        self._loop.run(
            self._update(lambda: self._change_adapter(adapter, loaded), version), self._config.call_timeout_s
        )

    async def _update(self, load: Callable[[], Awaitable[None]], version: int) -> None:
        """Change the weights while nothing is admitted; `load` awaits `_quiet` before it changes any."""
        async with self._changing:
            if "weights" in self._asleep:
                raise RolloutError("The weights of the vLLM engine sleep: call wake('weights') before they are loaded.")
            self._gate.hold("update", f"version {version} of the weights is being loaded")
            with self._broken_unless_done(version):
                await load()
                await self._front.reset_caches()
            self._version = version
            self._gate.mend()
            self._gate.release("weights")
            await self._release("update")

    @contextmanager
    def _broken_unless_done(self, version: int) -> Generator[None]:
        broken: RolloutError = TornWeightsError(
            f"Loading version {version} broke off midway: the engine holds weights of no version and generates nothing until an update "
            "succeeds. Send the weights again, or start a new engine."
        )
        done = False
        try:
            yield
            done = True
        except EngineDiedError as error:
            broken = error
            raise
        except (RLError, OSError) as error:
            raise TornWeightsError(f"{broken} The cause: {error}") from error
        finally:
            if not done:
                self._gate.break_(broken)

    async def _quiet(self) -> None:
        """Abort what runs, and return when nothing does."""
        await self._front.pause("abort")
        await self._drain()

    async def _begin_update(self) -> None:
        await self._quiet()
        await self._front.call("rollout_begin_update")

    async def _load_all(self, weights: Sequence[WeightTensor]) -> None:
        working: Awaitable[object] = asyncio.ensure_future(self._begin_update())
        for part in split(weights, self._config.bucket_bytes):
            try:
                await asyncio.sleep(0)  # the workers hear of it, and work while the next bucket is filled
                bucket = self._buckets.fill(part)
            finally:
                await working
            working = asyncio.ensure_future(self._send("rollout_load_bucket", bucket))
        await working
        await self._front.call("rollout_finish_update")
        # dropped with the base weights; a request that names it would end the engine's process
        if self._adapter is not None:
            await self._load_adapter(*self._adapter)

    async def _change_adapter(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        await self._quiet()
        await self._load_adapter(adapter, loaded)

    async def _load_adapter(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        bucket = self._buckets.fill(adapter.weights)
        await self._send("rollout_load_adapter", bucket, loaded.number, json.dumps(adapter.config))
        self._adapter = (adapter, loaded)

    async def _send(self, method: str, bucket: Bucket, *arguments: object) -> None:
        held: set[int] = set()
        answers = await self._front.call(method, bucket.path, bucket.entries, bucket.digest, *arguments)
        for worker, (digest, inodes) in enumerate(cast("list[Answer]", answers)):
            if digest != bucket.digest:
                raise RolloutError(
                    f"Worker {worker} of the vLLM engine read other bytes than were sent; none of them will be generated with."
                )
            held.update(inodes)
        self._buckets.answered(bucket, held)

    async def _open(
        self, start: Callable[[VLLMConfig, Checkpoint], Awaitable[Front]]
    ) -> tuple[Front, Gate, asyncio.Event]:
        return await start(self._config, self._model), Gate(), asyncio.Event()


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
        GenerationRequest(uid=request.uid, session=request.session, prompt_ids=(*request.prompt_ids, *so_far)),
        SamplingParams(
            max_new_tokens=left,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            ignore_eos=params.ignore_eos,
            seed=params.seed,
        ),
    )


class _Pulled:
    """A generator that is read and closed from another loop; closing waits for a reader that was cancelled to be out of it."""

    def __init__(self, ranges: AsyncGenerator[TokenRange]) -> None:
        self._ranges = ranges
        self._lock = asyncio.Lock()

    async def next(self) -> TokenRange | None:
        async with self._lock:
            return await anext(self._ranges, None)

    async def close(self) -> None:
        async with self._lock:
            await self._ranges.aclose()


def _range(piece: Piece, version: int) -> TokenRange:
    return TokenRange(piece.token_ids, piece.log_probs, version, piece.finish_reason)
