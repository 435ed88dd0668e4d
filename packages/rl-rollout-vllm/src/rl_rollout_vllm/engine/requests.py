"""Check generation requests, run them side by side, and continue them after updates."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from rl_protocol.counted import counted
from rl_protocol.errors import ConfigError, RolloutError
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_rollout_vllm.config import VLLMConfig
from rl_rollout_vllm.engine.admission import AdmissionControl
from rl_rollout_vllm.engine.engine_client import EngineClient, LoadedAdapter
from rl_rollout_vllm.engine.partial_generation import OnUpdate, TokenRange, continued
from rl_rollout_vllm.engine.placed_images import check_images, placed_images
from rl_rollout_vllm.sampling import required_logprobs_mode, sampling_arguments
from rl_rollout_vllm.weights.checkpoint import Checkpoint

_ABORT_AGAIN_S = 0.05


def check_requests(
    requests: Sequence[GenerationRequest], params: SamplingParams, config: VLLMConfig, model: Checkpoint
) -> None:
    """Check that an engine can serve these requests.

    Raises:
        ConfigError: vLLM, or this engine's logprobs_mode, can't serve the parameters.
        RolloutError: a request can't be served; names it.
    """
    if params.stop and not config.tokenizer:
        raise ConfigError("Stop strings need an engine with VLLMConfig.tokenizer=True; this one reads no text.")
    if params.routed_experts:
        raise ConfigError("A vLLM engine does not report the experts of tokens; set routed_experts to False.")
    if outside := [token for token in params.stop_token_ids if not 0 <= token < model.vocabulary]:
        raise ConfigError(
            f"SamplingParams.stop_token_ids must lie in 0..{model.vocabulary - 1}, the vocabulary of the model; got {outside}."
        )
    mode = required_logprobs_mode(params)
    if mode not in (None, config.logprobs_mode):
        raise ConfigError(
            f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k} need an engine with "
            f"logprobs_mode={mode!r}; this one has {config.logprobs_mode!r}."
        )
    if params.reports_kept_sets and params.top_k > config.max_logprobs:
        raise ConfigError(
            f"top_k={params.top_k} with kept sets needs an engine with VLLMConfig.max_logprobs of at least that; this one has "
            f"{config.max_logprobs}."
        )
    for request in requests:
        _check_prompt(request, params.max_new_tokens, config.max_model_len or model.context, model)


def _check_prompt(request: GenerationRequest, wanted: int, context: int, model: Checkpoint) -> None:
    ids, name = request.prompt_ids, f"Request {request.uid!r}, session {request.session}"
    if not ids:
        raise RolloutError(f"{name}: the prompt has no tokens; every prompt needs at least one.")
    check_images(request, model.vision, name)
    if len(ids) + wanted > context:
        raise RolloutError(
            f"{name}: the prompt has {len(ids)} tokens; with SamplingParams.max_new_tokens={wanted} that is "
            f"{len(ids) + wanted}, more than the engine's context of {context} (max_model_len)."
        )
    if not 0 <= min(ids) <= max(ids) < model.vocabulary:
        raise RolloutError(f"{name}: token ids must lie in 0..{model.vocabulary - 1}; got {min(ids)} to {max(ids)}.")


@dataclass(slots=True)
class ActiveWeights:
    """What requests are generated with.

    Attributes:
        version: version of the weights.
        adapter: the adapter in use; None: the base model alone.
    """

    version: int = 0
    adapter: LoadedAdapter | None = None


class RequestRunner:
    """Runs requests on the engine's event loop.

    Args:
        client: vLLM.
        admission: admits requests.
        active: the weights in use. They change only while no request runs.
        model: what the engine serves.
        timeout_s: longest wait for admission, and for running requests to end.
    """

    def __init__(
        self,
        client: EngineClient,
        admission: AdmissionControl,
        active: ActiveWeights,
        *,
        model: Checkpoint,
        timeout_s: float,
    ) -> None:
        self.running: set[str] = set()
        self._unanswered: set[str] = set()
        """Of those that run, the ones of which vLLM has returned nothing yet."""
        self._client = client
        self._admission = admission
        self._active = active
        self._model = model
        self._never = () if model.vision is None else model.vision.never_generated
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._stops = 0

    async def run_all(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_update: OnUpdate
    ) -> list[tuple[TokenRange, ...]]:
        """Run requests side by side and return the token ranges of each; one failure ends all."""
        tasks = [asyncio.ensure_future(self._run(request, params, on_update)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _run(
        self, request: GenerationRequest, params: SamplingParams, on_update: OnUpdate
    ) -> tuple[TokenRange, ...]:
        ranges = tuple([made async for made in self.token_ranges(request, params, on_update, stream=False)])
        if not ranges or ranges[-1].finish_reason is None:
            raise RolloutError(f"Request {request.uid!r}, session {request.session}: vLLM ended it without a reason.")
        return ranges

    async def token_ranges(
        self, request: GenerationRequest, params: SamplingParams, on_update: OnUpdate, *, stream: bool
    ) -> AsyncGenerator[TokenRange]:
        """Yield the tokens of one response; the last range has a finish reason.

        With `stream` they come as they are generated, otherwise one range per version.
        """
        await self._admission.enter(self._timeout_s)
        stops, so_far = self._stops, list[int]()
        rest: tuple[GenerationRequest, SamplingParams] | None = (request, params)
        while rest is not None:
            asked, rest = rest, None
            async with aclosing(self._part(*asked, stream=stream)) as part:
                async for made in part:
                    so_far += made.token_ids
                    if made.finish_reason != "abort" or on_update == "abort" or self._stops != stops:
                        yield made
                    elif (rest := continued(request, params, so_far)) is None:
                        yield replace(made, finish_reason="length")
                    elif made.token_ids:
                        yield replace(made, finish_reason=None)
            if rest is not None:
                await self._admission.enter(self._timeout_s)
                if self._stops != stops:  # stopped while it waited
                    yield TokenRange((), (), self._active.version, "abort")
                    return

    async def _part(
        self, request: GenerationRequest, params: SamplingParams, *, stream: bool
    ) -> AsyncGenerator[TokenRange]:
        """Generate with one version of the weights. The request must just have been admitted."""
        arguments = sampling_arguments(request, params, self._model.eos_ids, self._never)
        vision = self._model.vision
        images = () if vision is None else placed_images(request.prompt_ids, request.images, vision)
        number = f"{next(self._numbers)}"
        version, adapter = self._active.version, self._active.adapter
        self.running.add(number)
        self._unanswered.add(number)
        self._idle.clear()
        chunks = self._client.generate(number, request.prompt_ids, arguments, adapter, images, stream=stream)
        try:
            async for chunk in chunks:
                self._unanswered.discard(number)
                yield TokenRange(chunk.token_ids, chunk.log_probs, version, chunk.finish_reason, chunk.kept_ids)
        finally:
            await chunks.aclose()
            self.running.discard(number)
            self._unanswered.discard(number)
            if not self.running:
                self._idle.set()

    def stop_responses(self) -> None:
        """Don't continue the responses in flight, whatever their policy on updates."""
        self._stops += 1

    async def abort_running(self) -> None:
        """Abort the requests that run; they return the tokens they have.

        It returns when vLLM has returned something of each.
        """
        running = frozenset(self.running)
        await self._client.abort(running)
        await self._abort_while(lambda: running & self._unanswered)

    async def drain(self) -> None:
        """Abort what runs, and wait until nothing does."""
        await self._abort_while(lambda: self.running)

    async def _abort_while(self, left: Callable[[], Collection[str]]) -> None:
        """Abort requests until none is left.

        vLLM ignores the abort of a request that is still on its way to it.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while ids := left():
                    await self._client.abort(tuple(ids))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_AGAIN_S):
                            await self._idle.wait()
        except TimeoutError as error:
            raise RolloutError(
                f"vLLM did not end {counted(len(left()), 'request')} within {self._timeout_s:g} s (call_timeout_s)."
            ) from error

    async def quiesce(self) -> None:
        """Abort what runs and return when nothing does; vLLM is then paused."""
        await self._client.pause("abort")
        await self.drain()
