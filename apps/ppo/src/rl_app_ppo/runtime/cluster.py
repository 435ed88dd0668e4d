"""Ray: starting it, one actor class for all worker processes, and handles that speak bytes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from rl_app_ppo.runtime.local_ray import private_folder
from rl_app_ppo.runtime.messages import Role, WarmupProgress
from rl_app_ppo.schema import LOCAL, RayConfig, TrainerConfig
from rl_protocol import RLError, WorkerDiedError, WorkerError

logger = logging.getLogger(__name__)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
TASK_EVENTS = "RAY_task_events_report_interval_ms"
"""0: Ray keeps no record of every call, which the timeline of profiled steps is made from and which costs the driver time in each step."""
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; batches do not travel through it


@ray.remote
class WorkerProcess:
    """Hosts one worker; `call` is the only way in, and it carries bytes."""

    def __init__(self, role: Role, name: str, log_path: str, threads: int) -> None:
        from rl_app_ppo.host import Host  # imported where it runs: the driver loads neither torch nor transformers

        self._host = Host(role, name, Path(log_path), threads)

    async def call(self, method: str, payload: bytes) -> bytes:
        """See Host.call."""
        return await self._host.call(method, payload)

    async def warm_up(self, config: str) -> AsyncGenerator[bytes]:
        """See Host.warm_up."""
        async for progress in self._host.warm_up(config):
            yield msgspec.msgpack.encode(progress)


class RayWorker:
    """WorkerHandle over a WorkerProcess."""

    def __init__(self, role: Role, name: str, log_path: Path, threads: int, cpus: float = 0.0) -> None:
        self.name = name
        self.role: Role = role
        self.bytes_moved = 0
        self._log_path = log_path
        self._threads = threads
        self._cpus = cpus
        self._built: tuple[bytes, float] | None = None
        self._actor = self._start()

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """See rl_trainer.WorkerHandle.call."""
        self.bytes_moved += len(payload)
        if method == "build":
            self._built = payload, timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                answer: bytes = await self._actor.call.remote(method, payload)
        except (RayTaskError, RayActorError, TimeoutError) as error:
            raise self._translate(method, error, timeout_s) from None
        self.bytes_moved += len(answer)
        return answer

    async def ready(self, timeout_s: float) -> None:
        """Wait until the process has started.

        Raises:
            WorkerError: it died, or did not start in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._actor.__ray_ready__.remote()
        except (RayTaskError, RayActorError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                raise WorkerError(
                    f"Worker {self.name} did not start within {timeout_s:g} s (ray.start_timeout_s). Its log: {self._log_path}"
                ) from None
            raise self._translate("start", error, timeout_s) from None

    def send(self, method: str, payload: bytes) -> Callable[[], Awaitable[bytes]]:
        """Have the call begin before any that comes later, without waiting for it; what is returned waits.

        Raises:
            WorkerError: the process died (when waited for).
            RLError, OSError: what the handler raised (when waited for).
        """
        answer = self._actor.call.remote(method, payload)

        async def wait() -> bytes:
            try:
                return await answer
            except (RayTaskError, RayActorError) as error:
                raise self._translate(method, error, 0.0) from None

        return wait

    async def warm_up(self, config: str) -> AsyncIterator[WarmupProgress]:
        """Make the demo model in this worker, or find it in the cache; the last item carries its path."""
        try:
            async for item in self._actor.warm_up.options(num_returns="streaming").remote(config):
                yield msgspec.msgpack.decode(await item, type=WarmupProgress)
        except (RayTaskError, RayActorError) as error:
            raise self._translate("warm_up", error, 0.0) from None

    async def restart(self) -> None:
        """End the process, should it still live, and start another, built as it was.

        Raises:
            WorkerError: as `call`.
        """
        self.kill()
        self._actor = self._start()
        if self._built is not None:
            payload, timeout_s = self._built
            await self.call("build", payload, timeout_s=timeout_s)

    def kill(self) -> None:
        """End the process."""
        ray.kill(self._actor)

    def _start(self) -> Any:
        remote: Any = WorkerProcess
        options = remote.options(num_cpus=self._cpus, max_restarts=0, max_concurrency=16)
        return options.remote(self.role, self.name, str(self._log_path), self._threads)

    def _translate(self, method: str, error: Exception, timeout_s: float) -> RLError:
        log = f"Its log: {self._log_path}"
        if isinstance(error, RayTaskError):
            cause: object = getattr(error, "cause", None)
            if isinstance(cause, RLError):
                return cause
            return WorkerError(f"Worker {self.name} failed in {method}: {type(cause).__name__}: {cause}. {log}")
        if isinstance(error, RayActorError):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = f"{lines[0]} {lines[-1]}" if len(lines) > 1 else " ".join(lines)
            return WorkerDiedError(f"Worker {self.name} died during {method}: {_ANSI.sub('', reason)} {log}")
        return WorkerError(
            f"Worker {self.name} did not answer {method} within {timeout_s:g} s; raise trainer.stage_timeout_s or see its log. {log}"
        )


def write_timeline(path: Path) -> None:
    """Ray's timeline of all calls so far, for chrome://tracing and Perfetto.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ray.timeline(filename=str(path))


@asynccontextmanager
async def ray_session(config: RayConfig, trainer: TrainerConfig) -> AsyncGenerator[None]:
    """Ray, started on this machine (or joined), and left as it was found.

    Raises:
        WorkerError: Ray did not start in time, or the cluster can't be joined.
    """
    os.environ["OMP_NUM_THREADS"] = str(trainer.threads_per_worker)  # the workers inherit it
    with ExitStack() as stack:
        own: dict[str, Any] = {}
        if config.address == LOCAL:
            if not trainer.profile_steps:
                os.environ.setdefault(TASK_EVENTS, "0")
            own = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
            own["_temp_dir"] = str(stack.enter_context(private_folder()))
        await _init(config, own)
        stack.callback(ray.shutdown)
        # Ray has put a handler of its own before ours: it prints a stack and, 3 s later, aborts the process in the middle of its clean-up.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        yield


async def _init(config: RayConfig, own: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(config.start_timeout_s):
            await asyncio.to_thread(
                ray.init,
                address=config.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
                **own,
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise WorkerError(
            f"Ray did not start ({config.address}): {error}. Stop a stale session with 'ray stop', or set ray.address to a running cluster."
        ) from error
