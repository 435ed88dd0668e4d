"""VLLMRolloutEngine: the port RolloutEngine over vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from rl_protocol.batch.kept_sets import KeptSets
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError
from rl_protocol.ports import Generation, GenerationRequest, SamplingParams, WeightCapabilities
from rl_rollout_vllm.config import VLLMConfig
from rl_rollout_vllm.engine.admission import AdmissionControl
from rl_rollout_vllm.engine.engine_client import EngineClient, MemoryPart
from rl_rollout_vllm.engine.engine_control import EngineControl
from rl_rollout_vllm.engine.event_loop import LoopThread, RemoteIterator
from rl_rollout_vllm.engine.launch import start_vllm
from rl_rollout_vllm.engine.partial_generation import OnUpdate, TokenRange
from rl_rollout_vllm.engine.requests import ActiveWeights, RequestRunner, check_requests
from rl_rollout_vllm.engine.weight_sender import WeightLoader
from rl_rollout_vllm.weights.adapters import adapter_of_tensors, read_adapter
from rl_rollout_vllm.weights.buckets import check_weights
from rl_rollout_vllm.weights.checkpoint import Checkpoint, read_checkpoint, read_json, require_shards

StartEngine = Callable[[VLLMConfig, Checkpoint], Awaitable[EngineClient]]


class VLLMRolloutEngine:
    """RolloutEngine over a vLLM engine, which runs in its own process.

    The requests of one call run side by side, and so do several calls. An update of the weights
    aborts running requests. `generate` then returns a response with the tokens it has and the
    finish reason `abort`, so that one version generated all of it; `continued` makes the request
    for the rest. `ranges` and `stream` can continue responses by themselves, and return for all
    tokens the version that generated them. `abort`, `pause` and `sleep` end responses in any case.
    Requests that arrive during an update wait until the new weights are loaded and verified.

    Lifecycle: the constructor starts the process and returns when it answers; `close` ends it.
    Calls may come from any thread and event loop: they are passed to a loop in the engine's own
    thread.

    Args:
        config: see VLLMConfig.
        start: starts vLLM; replaced in tests.

    Raises:
        VLLMUnavailableError: vLLM is missing or of another version.
        ConfigError: the model folder or a setting is wrong.
        RolloutError: the engine did not start.
    """

    def __init__(self, config: VLLMConfig, *, start: StartEngine = start_vllm) -> None:
        model = read_checkpoint(config.model_path)
        require_shards(read_json(model.path / "config.json"), config.tensor_parallel_size)
        if config.max_model_len > model.context:
            raise ConfigError(
                f"vLLM engine: max_model_len={config.max_model_len} is more than the context of {model.context} of "
                f"{config.model_path}."
            )
        self._config = config
        self._model = model
        self._closed = False
        self._active = ActiveWeights()
        self._loop = LoopThread()
        try:
            self._client = self._loop.run(_start(start, config, model), config.start_timeout_s)
        except BaseException:
            self._loop.close()
            raise
        admission = AdmissionControl()
        self._requests = RequestRunner(
            self._client, admission, self._active, model=model, timeout_s=config.call_timeout_s
        )
        self._loader = WeightLoader(self._client, self._requests, self._active, bucket_bytes=config.bucket_bytes)
        self._control = EngineControl(self._client, admission, self._requests, self._loader, self._active)

    # -- generation

    @property
    def capabilities(self) -> WeightCapabilities:
        """It pauses, takes adapters if memory is reserved for them, and sleeps if vLLM can."""
        return WeightCapabilities(
            pauses=True,
            adapters=self._config.adapter is not None,
            sleeps=bool(self._client.sleep_levels),
            drops_weights=2 in self._client.sleep_levels,
        )

    @property
    def weight_version(self) -> int:
        """Version of the active weights."""
        return self._active.version

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """Generate one response per request, in order.

        Raises:
            RolloutError: a request can't be served, or is not admitted in time; names it.
            TornWeightsError: an update broke off, and no later one has succeeded.
            EngineDiedError: the engine's process is gone.
            ConfigError: vLLM, or this engine's logprobs_mode, can't serve the parameters.
        """
        made = await self.ranges(requests, params, on_update="abort")
        return [_generation(only, self._model.vocabulary) for (only,) in made]

    async def ranges(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, *, on_update: OnUpdate
    ) -> list[tuple[TokenRange, ...]]:
        """Generate one response per request, in order, each as its token ranges.

        The last range of a response has a finish reason and may have no tokens. If an update breaks
        off, the tokens of the responses it cut short are lost.

        Args:
            requests: the prompts.
            params: sampling parameters.
            on_update: with `abort` each response has one range. With `continue` the new weights
                continue a response that an update cut short: keys and values of all its tokens are
                computed again, the rest of the budget is requested, and the seed is that of the
                next position. What is drawn thus depends on when the update came.

        Raises:
            RLError: as `generate`.
            ConfigError: `continue` with stop strings. vLLM would miss one that the continuation
                completes.
        """
        check_requests(requests, params, self._config, self._model)
        _check_policy(params, on_update)
        return await self._loop.call(self._requests.run_all(requests, params, on_update))

    async def stream(
        self, request: GenerationRequest, params: SamplingParams, *, on_update: OnUpdate = "abort"
    ) -> AsyncGenerator[TokenRange]:
        """Yield the tokens of one response as they are generated; otherwise like `ranges`."""
        check_requests([request], params, self._config, self._model)
        _check_policy(params, on_update)
        remote = RemoteIterator(self._requests.token_ranges(request, params, on_update, stream=True))
        try:
            while (made := await self._loop.call(remote.next())) is not None:
                yield made
        finally:
            await self._loop.call(remote.close())

    # -- control

    async def abort(self) -> None:
        """End all running requests; they return the tokens they have."""
        await self._loop.call(self._control.abort())

    async def pause(self, mode: Literal["abort", "keep"] = "abort") -> None:
        """Admit nothing until `resume`.

        Running requests are aborted or kept; an update of the weights aborts kept ones.
        """
        await self._loop.call(self._control.pause(mode))

    async def resume(self) -> None:
        """Admit requests and resume kept ones, once no update is running or torn."""
        await self._loop.call(self._control.resume())

    async def sleep(self, level: Literal[1, 2] = 1) -> int | None:
        """Abort running requests, admit nothing, and give memory back until `wake`.

        Level 1 drops keys and values, and keeps the weights in host memory. Level 2 drops the
        weights
        too: load them after `wake("weights")`; nothing is generated before.

        Returns:
            Bytes of keys and values that the system got back; None: vLLM does not say.

        Raises:
            ConfigError: this engine does not support the level; nothing is changed.
            RolloutError: it sleeps already.
        """
        return await self._loop.call(self._control.sleep(level))

    async def wake(self, part: MemoryPart | None = None) -> None:
        """Allocate one part of the memory again, or all of it.

        Wake the weights first, load new ones if needed, then wake keys and values.

        Raises:
            RolloutError: keys and values come before the weights.
        """
        await self._loop.call(self._control.wake(part))

    def close(self) -> None:
        """End the engine's process; safe to call twice."""
        if not self._closed:
            self._closed = True
            try:
                self._loop.run(self._client.close(), self._config.call_timeout_s)
            finally:
                self._loop.close()
                self._loader.close()

    # -- weights

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Load all weights of the model, and block until requests are admitted again.

        The weights are checked as a whole before the first byte is sent. Then requests are aborted,
        buckets are loaded and their digests compared, the adapter, which vLLM drops, is loaded
        again, and caches are emptied.

        Raises:
            WeightSyncError: the weights do not fit; nothing is changed.
            TornWeightsError: loading broke off; nothing is generated until a later call succeeds.
            EngineDiedError: the engine's process is gone.
        """
        fitting = check_weights(weights, self._model, version)
        self._update(lambda: self._loader.load_weights(fitting), version, whole=True)

    def load_adapter(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Use this LoRA adapter from now on, in place of the previous one.

        Args:
            weights: tensors named as in a PEFT folder (`base_model.model.….lora_A.weight`).
            version: the version of adapter and base weights together.

        Raises:
            WeightSyncError: the adapter does not fit config.adapter, or the weights of the model
                were dropped by `sleep(2)` or by an update that broke off; nothing is changed.
            TornWeightsError: loading broke off; nothing is generated until a later call succeeds.
        """
        adapter = adapter_of_tensors(weights, self._config.adapter)
        self._update(lambda: self._loader.load_adapter(adapter, version), version, whole=False)

    def load_adapter_folder(self, path: str | Path, version: int) -> None:
        """Use the adapter of an HF PEFT folder from now on; otherwise like `load_adapter`.

        Raises:
            ConfigError: the folder can't be read.
        """
        adapter = read_adapter(Path(path), self._config.adapter)
        self._update(lambda: self._loader.load_adapter(adapter, version), version, whole=False)

    def _update(self, load: Callable[[], Awaitable[None]], version: int, *, whole: bool) -> None:
        self._loop.run(self._control.update(load, version, whole=whole), self._config.call_timeout_s)


def _check_policy(params: SamplingParams, on_update: OnUpdate) -> None:
    if params.stop and on_update == "continue":
        raise ConfigError(
            "on_update='continue' can't be used with stop strings: set 'abort', and request the rest with `continued`."
        )


async def _start(start: StartEngine, config: VLLMConfig, model: Checkpoint) -> EngineClient:
    return await start(config, model)


def _generation(made: TokenRange, vocabulary: int) -> Generation:
    assert made.finish_reason is not None, "the last range of a response"
    return Generation(
        response_ids=made.token_ids,
        log_probs=made.log_probs,
        finish_reason=made.finish_reason,
        weight_version=made.weight_version,
        kept=KeptSets.from_ids(made.kept_ids, vocabulary) if made.kept_ids else None,
    )
