"""Rolls prompts out through the replay buffer of a partition: leased, settled, taken, committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rl_protocol import ConfigError, DataLostError, KVBatchMeta, PlaneTimeout, RLError, RolloutError
from rl_protocol.ports import DataPlane, GroupFailure, Lease, ReplayBuffer, SessionResult, settle
from rl_protocol.rl_columns import prompt_partition
from rl_trainer.config import ReplayConfig
from rl_trainer.driver.rollout_router import imbalance, roll_out
from rl_trainer.driver.stage_calls import WorkerHandle, call
from rl_trainer.workers.messages import LeasedPrompt, Partition, PromptRef, RolloutCall, RolloutResult

Spare = Callable[[int], Sequence[PromptRef]]
"""Other prompts, in place of that many whose rollouts failed."""


@dataclass(frozen=True, slots=True)
class RolledOut:
    """The result of a rollout.

    Attributes:
        rows: the new trajectories, with tags, sorted by key.
        groups: how many prompts have any.
        imbalance: response tokens of the busiest replica over the mean.
        truncated: trajectories that reached rollout.response_length.
        failures: failed attempts at a prompt.
        replaced: prompts in whose place another one was rolled out.
    """

    rows: KVBatchMeta
    groups: int
    imbalance: float
    truncated: int
    failures: Sequence[GroupFailure]
    replaced: int


class Rollouts:
    """The rollout workers of a run.

    Args:
        plane: where trajectories go.
        workers: the rollout replicas.
        buffers: the replay buffer of each partition.
        replay: what happens to prompts whose rollouts fail.
        router: name of the routing policy.
        timeout_s: longest time of one call of a worker.
    """

    def __init__(
        self,
        plane: DataPlane,
        workers: Sequence[WorkerHandle],
        buffers: Mapping[str, ReplayBuffer],
        *,
        replay: ReplayConfig,
        router: str,
        timeout_s: float,
    ) -> None:
        self.plane = plane
        self.workers = workers
        self.replay = replay
        self.router = router
        self.timeout_s = timeout_s
        self._buffers = buffers
        self._open: dict[tuple[str, int], list[_Rollout]] = {}
        """Rollouts by partition and step, until their groups are committed."""
        self._taken: dict[tuple[str, int], list[str]] = {}

    async def roll_out(
        self, partition: Partition, prompts: Sequence[PromptRef], version: int, spare: Spare | None = None
    ) -> RolledOut:
        """Roll the prompts out with policy `version`, and take their groups.

        Args:
            partition: where the trajectories go.
            prompts: what to roll out.
            version: of the trainer's weights.
            spare: called for other prompts, unless replay.on_failure is `fail`; None: a prompt
                whose last attempt failed is an error.

        Raises:
            RolloutError: the rollouts of a prompt failed, or those of more prompts than these.
            RLError: a replica failed, and replay.on_failure is `fail`.
        """
        batch = partition.name, partition.step
        running = _Rollout(self, self._buffers[partition.name], partition, version)
        self._open.setdefault(batch, []).append(running)
        result = await running.run(prompts, spare if self.replay.on_failure != "fail" else None)
        self._taken.setdefault(batch, []).extend(dict.fromkeys(map(str, result.rows.tag_values("uid"))))
        return result

    @asynccontextmanager
    async def committed_after(self, name: str, step: int) -> AsyncGenerator[None]:
        """Commit the groups of this step that were taken from the partition on normal exit; after a
        failure they and their rows stay for inspection.
        """
        yield
        await self.commit(name, step)

    async def commit(self, name: str, step: int) -> None:
        """Commit the groups of this step that were taken from the partition, which removes their
        rows and prompts.
        """
        await self._buffers[name].commit(self._taken.pop((name, step), []))
        rollouts = self._open.pop((name, step), [])
        others = any(partition == name for partition, _ in self._open)
        prompts = [uid for rollout in rollouts for uid in rollout.prompts] if others else None
        await self.plane.clear(prompt_partition(name), prompts)

    async def clear(self, name: str) -> None:
        """Remove all groups and rows of the partition, and of its prompts."""
        for batch in [batch for batch in self._open if batch[0] == name]:
            del self._open[batch]
            self._taken.pop(batch, None)
        await self._buffers[name].clear()
        await self.plane.clear(prompt_partition(name))


class _Rollout:
    """One rollout: leases are dispatched as they become free, until all groups are finished."""

    def __init__(self, rollouts: Rollouts, buffer: ReplayBuffer, partition: Partition, version: int) -> None:
        self._rollouts = rollouts
        self._buffer = buffer
        self._partition = partition
        self._version = version
        self.prompts: dict[str, int] = {}
        """Row in the data set of each prompt."""
        self._attempt: dict[str, int] = {}
        """Newest attempt at each prompt."""
        self._calls: dict[asyncio.Task[None], Sequence[Lease]] = {}
        self._tokens = [0] * len(rollouts.workers)
        self._truncated = 0
        self._errors: list[RLError] = []
        self._replaced = 0
        replay = rollouts.replay
        self._deadline_s = rollouts.timeout_s + replay.max_attempts * replay.lease_s

    async def run(self, prompts: Sequence[PromptRef], spare: Spare | None) -> RolledOut:
        await self._add(prompts)
        try:
            async with asyncio.TaskGroup() as tasks:
                pump = tasks.create_task(self._dispatch(tasks))
                rows = await self._take(len(prompts), spare)
                pump.cancel()
                for task, leases in self._calls.items():
                    if any(self._attempt[lease.uid] != lease.attempt for lease in leases):
                        task.cancel()  # its leases ended, and their prompts were rolled out again
        except* RLError as failed:
            raise failed.exceptions[0] from None
        return RolledOut(
            rows.select_keys(sorted(rows.keys)),  # by name, not by arrival: the same batch in every run
            len(set(rows.tag_values("uid"))),
            imbalance(self._tokens),
            self._truncated,
            self._buffer.failures(),
            self._replaced,
        )

    async def _add(self, prompts: Sequence[PromptRef]) -> None:
        self.prompts |= {prompt.uid: prompt.row for prompt in prompts}
        await self._buffer.add([prompt.uid for prompt in prompts], self._partition.n)

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        """Send prompts to the replicas whenever some may start."""
        while True:
            with suppress(PlaneTimeout):  # nothing may start; `_take` has the deadline
                leases = await self._buffer.lease(len(self.prompts), version=self._version, timeout_s=self._deadline_s)
                self._attempt |= {lease.uid: lease.attempt for lease in leases}
                prompts = tuple(LeasedPrompt(lease, self.prompts[lease.uid]) for lease in leases)
                whole = RolloutCall(partition=self._partition, prompts=prompts)
                self._calls[tasks.create_task(self._run_call(whole))] = leases

    async def _run_call(self, whole: RolloutCall) -> None:
        workers = self._rollouts.workers
        for result in await roll_out(len(workers), whole, self._rollouts.router, self._send):
            self._truncated += result.truncated

    async def _send(self, replica: int, part: RolloutCall) -> RolloutResult:
        """Call a replica; if it fails, settle its sessions with that error."""
        worker, timeout_s = self._rollouts.workers[replica], self._rollouts.timeout_s
        try:
            result = await call(worker, "rollout", part, RolloutResult, timeout_s)
        except (ConfigError, DataLostError):
            raise
        except RLError as error:
            self._errors.append(error)
            reason = f"{worker.name}: {error}"
            failed = [SessionResult(p.lease, s, error=reason) for p in part.prompts for s in p.lease.sessions]
            await settle(self._rollouts.plane, failed, timeout_s=timeout_s)
            return RolloutResult()
        self._tokens[replica] += result.tokens
        return result

    async def _take(self, count: int, spare: Spare | None) -> KVBatchMeta:
        """Take the groups; replace prompts that failed.

        At most as many prompts are replaced as there were: a rollout that always fails must end.
        """
        while True:
            try:
                return await self._buffer.take(count, version=self._version, timeout_s=self._deadline_s)
            except RolloutError as error:
                failed = list(self._buffer.failed())
                if spare is None or not failed or self._replaced + len(failed) > count:
                    raise (self._errors[0] if self._errors and spare is None else error) from None
            self._replaced += len(failed)
            await self._buffer.discard(failed)
            await self._add(spare(len(failed)))
