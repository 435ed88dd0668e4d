"""The Ray actor class that hosts the workers of a process, and the driver's handles to it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from rl_app_ppo.config.placement import Role
from rl_app_ppo.worker.messages import WarmupProgress
from rl_protocol import RLError, WorkerDiedError, WorkerError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@ray.remote
class WorkerProcess:
    """The Ray actor: one process with a worker for each of its roles, called with bytes."""

    def __init__(self, roles: Sequence[Role], name: str, log_path: str, threads: int) -> None:
        from rl_app_ppo.worker.process import WorkerHost  # here, so that the driver does not import torch

        self._host = WorkerHost(roles, name, Path(log_path), threads)

    async def call(self, role: Role, method: str, payload: bytes) -> bytes:
        return await self._host.call(role, method, payload)

    async def warm_up(self, config: str) -> AsyncGenerator[bytes]:
        async for progress in self._host.warm_up(config):
            yield msgspec.msgpack.encode(progress)


class RayProcess:
    """The driver's handle of a WorkerProcess.

    Args:
        roles: roles of its workers.
        name: its name, in messages.
        log_path: its log.
        threads: compute threads; 0: all cores, shared with the processes that compute beside it.
        cpus: CPUs that Ray reserves.
    """

    def __init__(self, roles: Sequence[Role], name: str, log_path: Path, threads: int, cpus: float = 0.0) -> None:
        self.name = name
        self.roles = tuple(roles)
        self._log_path = log_path
        self._threads = threads
        self._cpus = cpus
        self._built: tuple[bytes, float] | None = None
        self._actor = self._start()

    async def build(self, payload: bytes, *, timeout_s: float) -> None:
        """Load the models of all roles; `payload` is a BuildCall.

        Raises:
            WorkerError: as `call`.
        """
        self._built = payload, timeout_s
        await self.call(self.roles[0], "build", payload, name=self.name, timeout_s=timeout_s)

    async def call(self, role: Role, method: str, payload: bytes, *, name: str, timeout_s: float) -> bytes:
        """Run a handler of a role's worker; `name` is that worker's, in messages.

        Raises:
            WorkerError: see WorkerHandle.call.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer: bytes = await self._actor.call.remote(role, method, payload)
        except (RayTaskError, RayActorError, TimeoutError) as error:
            raise self._translate(name, method, error, timeout_s) from None
        return answer

    async def ready(self, timeout_s: float) -> None:
        """Wait until the process has started.

        Raises:
            WorkerError: it died, or did not start within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._actor.__ray_ready__.remote()
        except (RayTaskError, RayActorError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                raise WorkerError(
                    f"Worker {self.name} did not start within {timeout_s:g} s (ray.start_timeout_s). Its log: {self._log_path}"
                ) from None
            raise self._translate(self.name, "start", error, timeout_s) from None

    def send(self, method: str, payload: bytes) -> Callable[[], Awaitable[bytes]]:
        """Start a call, ahead of all later ones, without waiting for it.

        Returns:
            A function that waits for the answer. It raises WorkerError if the process died, and
            the RLError or OSError of the handler.
        """
        answer = self._actor.call.remote(self.roles[0], method, payload)

        async def wait() -> bytes:
            try:
                return await answer
            except (RayTaskError, RayActorError) as error:
                raise self._translate(self.name, method, error, 0.0) from None

        return wait

    async def warm_up(self, config: str) -> AsyncIterator[WarmupProgress]:
        """Make the demo model or find it in the cache; the last item has its path."""
        try:
            async for item in self._actor.warm_up.options(num_returns="streaming").remote(config):
                yield msgspec.msgpack.decode(await item, type=WarmupProgress)
        except (RayTaskError, RayActorError) as error:
            raise self._translate(self.name, "warm_up", error, 0.0) from None

    async def restart(self) -> None:
        """Kill the process if it still runs, and start and build another in its place.

        Raises:
            WorkerError: as `call`.
        """
        self.kill()
        self._actor = self._start()
        if self._built is not None:
            payload, timeout_s = self._built
            await self.build(payload, timeout_s=timeout_s)

    def kill(self) -> None:
        """Kill the process."""
        ray.kill(self._actor)

    def _start(self) -> Any:
        remote: Any = WorkerProcess
        options = remote.options(num_cpus=self._cpus, max_restarts=0, max_concurrency=16)
        return options.remote(self.roles, self.name, str(self._log_path), self._threads)

    def _translate(self, name: str, method: str, error: Exception, timeout_s: float) -> RLError:
        log = f"Its log: {self._log_path}"
        if isinstance(error, RayTaskError):
            cause: object = getattr(error, "cause", None)
            if isinstance(cause, RLError):
                return cause
            return WorkerError(f"Worker {name} failed in {method}: {type(cause).__name__}: {cause}. {log}")
        if isinstance(error, RayActorError):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = f"{lines[0]} {lines[-1]}" if len(lines) > 1 else " ".join(lines)
            return WorkerDiedError(f"Worker {name} died during {method}: {_ANSI.sub('', reason)} {log}")
        return WorkerError(
            f"Worker {name} did not answer {method} within {timeout_s:g} s; raise trainer.stage_timeout_s or see its log. {log}"
        )


class RayWorker:
    """The driver's WorkerHandle of one role in a process.

    Attributes:
        name: its name, in messages.
        role: its role.
        process: the process, which may have other roles, too.
        bytes_moved: bytes of its requests and answers.
    """

    def __init__(self, process: RayProcess, role: Role, name: str) -> None:
        self.name = name
        self.role: Role = role
        self.process = process
        self.bytes_moved = 0

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        self.bytes_moved += len(payload)
        answer = await self.process.call(self.role, method, payload, name=self.name, timeout_s=timeout_s)
        self.bytes_moved += len(answer)
        return answer

    async def restart(self) -> None:
        """Replace the process; see RayProcess.restart."""
        await self.process.restart()
