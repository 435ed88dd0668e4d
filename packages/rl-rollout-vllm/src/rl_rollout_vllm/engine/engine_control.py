"""Pause, sleep and update an engine, one at a time, and admit requests when it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

from rl_protocol.errors import ConfigError, RLError, RolloutError, WeightSyncError
from rl_rollout_vllm.engine.admission import AdmissionControl
from rl_rollout_vllm.engine.engine_client import EngineClient, MemoryPart
from rl_rollout_vllm.engine.requests import ActiveWeights, RequestRunner
from rl_rollout_vllm.engine.weight_sender import WeightLoader
from rl_rollout_vllm.errors import EngineDiedError, TornWeightsError


class EngineControl:
    """Changes the state of an engine. Used on the engine's event loop.

    Args:
        client: vLLM.
        admission: closed while the engine can't generate.
        requests: what runs.
        loader: releases its memory during sleep.
        active: gets the version.
    """

    def __init__(
        self,
        client: EngineClient,
        admission: AdmissionControl,
        requests: RequestRunner,
        loader: WeightLoader,
        active: ActiveWeights,
    ) -> None:
        self._client = client
        self._admission = admission
        self._requests = requests
        self._loader = loader
        self._active = active
        self._asleep: list[MemoryPart] = []
        self._lost = ""  # why the weights of the model can't be used; empty: they can
        self._changing = asyncio.Lock()

    async def abort(self) -> None:
        """Abort all running requests."""
        self._requests.stop_responses()
        await self._requests.abort_running()

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Close admission, and abort or keep the running requests."""
        async with self._change():
            self._admission.close("pause", "the engine is paused, call resume")
            if mode == "abort":
                self._requests.stop_responses()
            await self._client.pause(mode)
            if mode == "abort":
                await self._requests.drain()

    async def resume(self) -> None:
        """Undo `pause`."""
        async with self._change():
            await self._reopen("pause")

    async def sleep(self, level: int) -> int | None:
        """Abort what runs and give memory back; returns its bytes, None if they are unknown."""
        levels = self._client.sleep_levels
        if level not in levels:
            raise ConfigError(
                f"This vLLM engine can't sleep at level {level}; levels that give memory back here: {list(levels)}. On GPUs "
                "set VLLMConfig.sleep_mode; on CPU level 2 is not possible because vLLM's weights are prepacked."
            )
        async with self._change():
            if self._asleep:
                raise RolloutError("The vLLM engine sleeps already; call wake.")
            self._admission.close("sleep", "the engine sleeps, call wake")
            self._requests.stop_responses()
            await self._requests.quiesce()
            self._asleep = ["weights", "kv_cache"]
            if level == 2:
                self._lost = "sleep(2) has given the weights up"
                self._admission.close("weights", f"{self._lost}, load them")
            await self._loader.release_memory()
            return await self._client.sleep(level)

    async def wake(self, part: MemoryPart | None) -> None:
        """Undo `sleep` for one part of the memory, or for all of it."""
        async with self._change():
            if part == "kv_cache" and "weights" in self._asleep:
                raise RolloutError("Wake the weights of the vLLM engine before its keys and values.")
            for one in tuple(self._asleep):
                if part in (None, one):
                    await self._client.wake(one)
                    self._asleep.remove(one)
            if not self._asleep:
                await self._reopen("sleep")

    async def update(self, load: Callable[[], Awaitable[None]], version: int, *, whole: bool) -> None:
        """Run `load`, which changes the weights once nothing runs, then admit requests again.

        Args:
            load: loads an adapter or all weights of the model.
            version: the version of what it loads.
            whole: it loads all weights of the model.
        """
        async with self._change():
            if "weights" in self._asleep:
                raise RolloutError(
                    "The weights of the vLLM engine sleep: call wake('weights') before loading new ones."
                )
            if self._lost and not whole:
                raise WeightSyncError(
                    f"The adapter of version {version} can't be used without the weights of the model: {self._lost}. Load all of them first."
                )
            self._admission.close("update", f"version {version} of the weights is being loaded")
            with self._fail_unless_done(version):
                if whole:
                    self._lost = f"loading version {version} broke off"
                await load()
                await self._client.reset_caches()
            self._lost = ""
            self._active.version = version
            self._admission.recover()
            self._admission.reopen("weights")
            await self._reopen("update")

    async def _reopen(self, name: str) -> None:
        """Remove a reason to be closed; if it is the last one, vLLM schedules requests first."""
        if self._admission.would_admit_without(name):
            await self._client.resume()
        self._admission.reopen(name)

    @asynccontextmanager
    async def _change(self) -> AsyncGenerator[None]:
        """Let one change happen at a time; if it finds that the engine has died, requests fail."""
        async with self._changing:
            try:
                yield
            except EngineDiedError as error:
                self._admission.fail(error)
                raise

    @contextmanager
    def _fail_unless_done(self, version: int) -> Generator[None]:
        """Fail admission if the block does not finish: the weights then belong to no version."""
        torn: RolloutError = TornWeightsError(
            f"Loading version {version} broke off midway: the weights of the engine belong to no version, and it generates "
            "nothing until an update succeeds. Send the weights again, or start a new engine."
        )
        done = False
        try:
            yield
            done = True
        except EngineDiedError as error:
            torn = error
            raise
        except (RLError, OSError) as error:
            raise TornWeightsError(f"{torn} The cause: {error}") from error
        finally:
            if not done:
                self._admission.fail(torn)
