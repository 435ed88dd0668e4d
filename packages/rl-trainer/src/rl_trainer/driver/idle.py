"""Seconds in which the workers of a role had no call, by cause: the metrics `idle/<role>/<cause>`.

A role is busy while one of its workers has a call. Otherwise it is idle, because weights are sent
(`refit`), a validation runs (`validation`), or it waits for the work of another role (`starved`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Literal, TypeVar, get_args

from rl_trainer.driver.stage_calls import WorkerHandle, Workers

K = TypeVar("K")
Role = Literal["rollout", "trainer", "reward"]
Cause = Literal["validation", "refit"]
ROLES: tuple[Role, ...] = get_args(Role)
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Of two at once, the first one counts."""


class IdleClock:
    """Measures the idle time of each role. The trainer's are actors, critics and references.

    >>> seconds = iter([0.0, 2.0, 5.0, 6.0])
    >>> clock = IdleClock(lambda: next(seconds))
    >>> with clock.busy("trainer"):
    ...     pass
    >>> idle = clock.read()
    >>> idle["idle/trainer/starved"], idle["idle/rollout/starved"]
    (3.0, 6.0)

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()
        self._busy = Counter[Role]()
        self._causes = Counter[Cause]()
        self._idle = self._zero()

    def watched(self, workers: Workers) -> Workers:
        """The same workers, whose calls make their role busy."""
        seen: dict[int, _Watched] = {}

        def watch(handles: Sequence[WorkerHandle], role: Role) -> list[WorkerHandle]:
            return [seen.setdefault(id(handle), _Watched(handle, self, role)) for handle in handles]

        return replace(
            workers,
            rollout=watch(workers.rollout, "rollout"),
            reward=watch([workers.reward], "reward")[0],
            actor=watch(workers.actor, "trainer"),
            ref=watch(workers.ref, "trainer"),
            critic=watch(workers.critic, "trainer"),
        )

    def busy(self, role: Role) -> AbstractContextManager[None]:
        """Within it, a worker of the role answers a call."""
        return self._counted(self._busy, role)

    def because(self, cause: Cause) -> AbstractContextManager[None]:
        """Within it, idle roles are idle for this cause."""
        return self._counted(self._causes, cause)

    @contextmanager
    def _counted(self, counts: dict[K, int], key: K) -> Generator[None]:
        self._advance()
        counts[key] += 1
        try:
            yield
        finally:
            self._advance()
            counts[key] -= 1

    def read(self) -> dict[str, float]:
        """Idle seconds since the last call, by metric."""
        self._advance()
        found, self._idle = self._idle, self._zero()
        return found

    def _advance(self) -> None:
        now = self._now()
        passed, self._since = now - self._since, now
        cause = next((cause for cause in CAUSES if self._causes[cause]), "starved")
        for role in ROLES:
            if not self._busy[role]:
                self._idle[f"idle/{role}/{cause}"] += passed

    @staticmethod
    def _zero() -> dict[str, float]:
        return {f"idle/{role}/{cause}": 0.0 for role in ROLES for cause in ("starved", *CAUSES)}


class _Watched:
    """A WorkerHandle whose calls make its role busy."""

    def __init__(self, worker: WorkerHandle, clock: IdleClock, role: Role) -> None:
        self._worker = worker
        self._clock = clock
        self._role: Role = role

    @property
    def name(self) -> str:
        return self._worker.name

    @property
    def process(self) -> object:
        return self._worker.process

    @property
    def bytes_moved(self) -> int:
        return self._worker.bytes_moved

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        with self._clock.busy(self._role):
            return await self._worker.call(method, payload, timeout_s=timeout_s)
