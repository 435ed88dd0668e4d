"""Rolls prompts out through the replay buffer of a partition: leased, settled, taken, committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain

from rl_protocol import ConfigError, DataLostError, KVBatchMeta, PlaneTimeout, RLError, RolloutError, WorkerDiedError
from rl_protocol.batch.row_key import key_text
from rl_protocol.ports import DataPlane, GroupFailure, Lease, ReplayBuffer, SessionResult, settle
from rl_protocol.rl_columns import prompt_partition
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.asyncio_tasks import deadline
from rl_trainer.config import ReplayConfig
from rl_trainer.data.prompt_draws import turn_of
from rl_trainer.driver.batch_queue import MOST_STAGES
from rl_trainer.driver.replica_gate import Permits, ReplicaGate
from rl_trainer.driver.rollout_router import Router, num_sessions, roll_out
from rl_trainer.driver.stage_calls import WorkerHandle, call
from rl_trainer.workers.columns import TRUNCATED, weight_versions
from rl_trainer.workers.messages import LeasedPrompt, Partition, PromptRef, RolloutCall, RolloutResult

Spare = Callable[[int], Sequence[PromptRef]]
"""Other prompts, in place of that many whose rollouts failed."""
Generated = Callable[[KVBatchMeta], Awaitable[object]]
"""Called with the trajectories of a call that has ended, while others still generate; not for
sessions with several trajectories.
"""


@dataclass(frozen=True, slots=True)
class RolledOut:
    """The result of a rollout.

    Attributes:
        rows: the new trajectories, with tags, sorted by key; none if the rollout was stopped.
        groups: how many prompts have any.
        tokens: [R] response tokens that each replica generated.
        truncated: trajectories that reached rollout.response_length.
        failures: failed attempts at a prompt.
        replaced: prompts in whose place another one was rolled out.
        overtaken: prompts with a response during which the weights changed.
    """

    rows: KVBatchMeta
    groups: int
    tokens: Sequence[int]
    truncated: int
    failures: Sequence[GroupFailure]
    replaced: int
    overtaken: int


def join_rows(parts: Sequence[KVBatchMeta]) -> KVBatchMeta:
    """Rows of all parts, with the columns that all of them have.

    Rows from before a restart may have columns of stages that were computed then.
    """
    shared = [name for name in parts[0].fields if all(name in part.fields for part in parts)]
    return KVBatchMeta.concat([part.select_fields(shared) for part in parts])


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A finished group that was generated before a restart."""

    version: int
    """Of the weights that started it."""
    row: int
    """Row in the data set of its prompt."""


class Rollouts:
    """The rollout workers of a run.

    Args:
        plane: where trajectories go.
        workers: the rollout replicas.
        buffers: the replay buffer of each partition.
        policy: how many prompts are generated at once.
        replay: what happens to prompts whose rollouts fail.
        router: name of the routing policy.
        timeout_s: longest time of one call of a worker.

    Attributes:
        version: of the weights of the replicas.
        gate: closed while they change.
    """

    def __init__(
        self,
        plane: DataPlane,
        workers: Sequence[WorkerHandle],
        buffers: Mapping[str, ReplayBuffer],
        *,
        policy: StalenessPolicy,
        replay: ReplayConfig,
        router: str,
        timeout_s: float,
    ) -> None:
        self.plane = plane
        self.workers = workers
        self.policy = policy
        self.replay = replay
        self.router = router
        self.timeout_s = timeout_s
        self.version = 0
        longest_s = MOST_STAGES * timeout_s
        self.gate = ReplicaGate(longest_s)
        self.permits = {name: Permits(policy.permits, longest_s) for name in buffers}
        """To generate, by partition."""
        self.shared_router = Router("least_loaded" if router == "even" else router, len(workers))
        """Chooses replicas for the calls of one prompt."""
        self.running = 0
        """Rollouts that run or wait for a permit."""
        self._buffers = buffers
        self._failures: dict[str, list[GroupFailure]] = {}
        self._open: dict[tuple[str, int], list[_Rollout]] = {}
        """Rollouts by partition and turn, until their groups are committed."""
        self._taken: dict[tuple[str, int], list[str]] = {}
        self._restored: dict[tuple[str, int], list[str]] = {}
        """Prompts that were rolled out before a restart, until their groups are committed."""
        self._kept: dict[tuple[str, str], KeptGroup] = {}
        """Groups by partition and uid, until their prompts are rolled out again."""

    async def roll_out(
        self,
        partition: Partition,
        prompts: Sequence[PromptRef],
        spare: Spare | None = None,
        *,
        turn: int | None = None,
        generated: Generated | None = None,
    ) -> RolledOut:
        """Roll the prompts out, and take their groups.

        Several rollouts may run at once; the one of the lowest step gets the next permit.

        Args:
            partition: where the trajectories go.
            prompts: what to roll out.
            spare: called for other prompts, unless replay.on_failure is `fail`; None: a prompt
                whose last attempt failed is an error.
            turn: whose groups are committed, stopped and dropped together; None: those of the step.
            generated: see Generated.

        Raises:
            RolloutError: the rollouts of a prompt failed, or those of more prompts than these.
            RLError: a replica failed, and replay.on_failure is `fail`.
        """
        batch = partition.name, partition.step if turn is None else turn
        self.running += 1
        try:
            rollout = _Rollout(self, self._buffers[partition.name], partition, generated)
            self._open.setdefault(batch, []).append(rollout)
            result = await rollout.run(prompts, spare if self.replay.on_failure != "fail" else None)
        finally:
            self.running -= 1
        self._taken.setdefault(batch, []).extend(dict.fromkeys(map(str, result.rows.tag_values("uid"))))
        return result

    def adopt(self, name: str, turn: int, uids: Sequence[str]) -> None:
        """Commit these taken groups of the partition, and their prompts, with those of the turn."""
        self._taken.setdefault((name, turn), []).extend(uids)
        self._restored[name, turn] = list(uids)

    def taken(self, name: str, turns: Collection[int]) -> list[str]:
        """The groups of these turns that were taken and not committed."""
        return [uid for turn in turns for uid in self._taken.get((name, turn), [])]

    def unused(self, name: str) -> int:
        """Number of kept groups whose prompts were not rolled out again yet."""
        return sum(partition == name for partition, _ in self._kept)

    async def keep(self, name: str, groups: Mapping[str, KeptGroup]) -> None:
        """Keep these finished groups of the partition for the rollouts of their prompts; discard
        all others.
        """
        await self._clear_but(name, groups, groups)
        self._kept |= {(name, uid): group for uid, group in groups.items()}

    async def reuse(self, name: str, prompts: Sequence[PromptRef]) -> dict[str, int]:
        """Those of these prompts that have a group already, with the version that started it."""
        found = {prompt: self._kept.pop((name, prompt.uid)) for prompt in prompts if (name, prompt.uid) in self._kept}
        other = [prompt.uid for prompt, group in found.items() if group.row != prompt.row]
        if other:
            await self._buffers[name].discard(other)
        return {prompt.uid: group.version for prompt, group in found.items() if group.row == prompt.row}

    async def discard_unused(self, name: str, turn: int) -> None:
        """Discard the kept groups of a turn that was sampled: it has not rolled out their prompts,
        such as those that had replaced others before the restart.
        """
        uids = [uid for partition, uid in self._kept if partition == name and turn_of(uid) == turn]
        if uids:
            self._kept = {key: group for key, group in self._kept.items() if key not in {(name, uid) for uid in uids}}
            await self._buffers[name].discard(uids)
            await self.plane.clear(prompt_partition(name), uids)

    def started(self, name: str) -> dict[int, int]:
        """The version that started the newest prompts of each turn of a partition, if any have
        started.
        """
        newest = {turn: rollouts[-1].started for (partition, turn), rollouts in self._open.items() if partition == name}
        return {turn: version for turn, version in newest.items() if version is not None}

    async def stop(self, name: str, turn: int) -> None:
        """End the rollout of a turn that waits for its groups, and its generation; it returns no
        rows.
        """
        for rollout in self._open.get((name, turn), []):
            await rollout.stop()

    async def drop(self, name: str, turn: int) -> None:
        """Discard the groups of a turn whose rollouts have ended. Their prompts stay until the
        commit of the turn.
        """
        uids = self._taken.pop((name, turn), [])
        for rollout in self._open.get((name, turn), []):
            uids += rollout.left
            rollout.left = []
        await self._buffers[name].discard(uids)

    def failures_of(self, name: str, uids: Collection[str]) -> list[GroupFailure]:
        """Failed attempts at these prompts of the partition since the last call, the oldest
        first.
        """
        known = [*self._failures.pop(name, []), *self._buffers[name].failures()]
        self._failures[name] = [failure for failure in known if failure.uid not in uids]
        return [failure for failure in known if failure.uid in uids]

    def in_flight(self, name: str) -> list[int]:
        """Versions of the weights that started the prompts of a partition which are generated
        now.
        """
        rollouts = chain.from_iterable(found for (partition, _), found in self._open.items() if partition == name)
        return [lease.version for rollout in rollouts for lease in rollout.in_flight()]

    @asynccontextmanager
    async def committed_after(self, name: str, step: int) -> AsyncGenerator[None]:
        """Commit the groups of this step that were taken from the partition on normal exit; after a
        failure they and their rows stay for inspection.
        """
        yield
        await self.commit(name, [step])

    async def commit(self, name: str, turns: Sequence[int]) -> None:
        """Commit the groups of these turns that were taken from the partition, which removes their
        rows and prompts.
        """
        batches = [(name, turn) for turn in turns]
        await self._buffers[name].commit([uid for batch in batches for uid in self._taken.pop(batch, [])])
        prompts = [uid for batch in batches for uid in self._prompts_of(batch)]
        for batch in batches:
            self._open.pop(batch, None)
            self._restored.pop(batch, None)
        others = any(partition == name for partition, _ in (*self._open, *self._restored, *self._kept))
        await self.plane.clear(prompt_partition(name), prompts if others else None)

    def _prompts_of(self, batch: tuple[str, int]) -> list[str]:
        """All prompts of a partition and turn, also those without a group."""
        rollouts = self._open.get(batch, [])
        return [*self._restored.get(batch, []), *(uid for rollout in rollouts for uid in rollout.prompts)]

    async def clear(self, name: str, keep: Collection[int] = ()) -> None:
        """Remove all groups and rows of the partition, and of its prompts, but for the groups that
        these turns have taken.
        """
        groups = self.taken(name, keep)
        prompts = [uid for turn in keep for uid in self._prompts_of((name, turn))]
        for batch in [batch for batch in (*self._open, *self._restored) if batch[0] == name and batch[1] not in keep]:
            self._open.pop(batch, None)
            self._restored.pop(batch, None)
            self._taken.pop(batch, None)
        self._failures.pop(name, None)
        await self._clear_but(name, groups, prompts)

    async def _clear_but(self, name: str, groups: Collection[str], prompts: Collection[str]) -> None:
        """Remove all groups and prompts of a partition but these."""
        self._kept = {key: group for key, group in self._kept.items() if key[0] != name}
        buffer = self._buffers[name]
        if groups:
            await buffer.discard([uid for uid in buffer.statuses() if uid not in groups])
            listed = (await self.plane.list_rows(prompt_partition(name))).keys
            await self.plane.clear(prompt_partition(name), [uid for uid in listed if uid not in prompts])
        else:
            await buffer.clear()
            await self.plane.clear(prompt_partition(name))


class _Rollout:
    """One rollout: prompts are leased and sent as permits allow, until all groups are finished.

    A prompt keeps its permit until its group is taken, so further attempts at it need no other one.
    """

    def __init__(
        self, rollouts: Rollouts, buffer: ReplayBuffer, partition: Partition, generated: Generated | None
    ) -> None:
        self._rollouts = rollouts
        self._generated = generated
        self._generating = 0
        """Calls that run."""
        self._buffer = buffer
        self._partition = partition
        self.prompts: dict[str, int] = {}
        """Row in the data set of each prompt."""
        self._attempt: dict[str, int] = {}
        """Newest attempt at each prompt."""
        self._version: dict[str, int] = {}
        """Version of the weights that started it."""
        self._permitted: list[tuple[Collection[str], asyncio.Task[None]]] = []
        """The prompts of each permit, and what sends them."""
        self._calls: dict[asyncio.Task[None], Sequence[Lease]] = {}
        self._tokens = [0] * len(rollouts.workers)
        self._errors: list[RLError] = []
        self._replaced = 0
        self._discarded: set[str] = set()
        self.left: list[str] = []
        """Prompts whose groups were not taken, because the rollout was stopped."""
        self._stopped = False
        self._taking: asyncio.Timeout | None = None
        replay = rollouts.replay
        # each of the rollouts before this one may take as long
        self._deadline_s = rollouts.running * (rollouts.timeout_s + replay.max_attempts * replay.lease_s)

    async def run(self, prompts: Sequence[PromptRef], spare: Spare | None) -> RolledOut:
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._add(tasks, prompts)
                rows = await self._take_all(tasks, len(prompts), spare)
                self._end({*self.prompts})
                for task, leases in self._calls.items():
                    if rows is None or any(self._attempt[lease.uid] != lease.attempt for lease in leases):
                        task.cancel()  # its answer is not needed
        except* RLError as failed:
            raise failed.exceptions[0] from None
        if rows is None:
            self.left = list(self.prompts.keys() - self._discarded)
            rows = KVBatchMeta(partition=self._partition.name, keys=(), tags=())
        return RolledOut(
            rows.select_keys(sorted(rows.keys)),  # by name, not by arrival: the same batch in every run
            len(set(rows.tag_values("uid"))),
            self._tokens,
            sum(TRUNCATED in tag for tag in rows.tags),
            self._rollouts.failures_of(self._partition.name, self.prompts),
            self._replaced,
            self._overtaken(rows),
        )

    def _overtaken(self, rows: KVBatchMeta) -> int:
        """Number of prompts with a response that newer weights generated than those that started
        it.
        """
        uids, (_, newest) = rows.tag_values("uid"), weight_versions(rows.tags)
        found = set(zip(map(str, uids), newest, strict=True))
        return len({uid for uid, version in found if version is not None and int(version) > self._version[uid]})

    @property
    def started(self) -> int | None:
        """The version that started the newest of its prompts; None: it has not, or was stopped."""
        return None if self._stopped else self._version.get(next(reversed(self.prompts)))

    async def stop(self) -> None:
        """Wait for no more groups, and cancel the calls that generate them.

        Raises:
            HangError: a cancelled call does not end.
        """
        self._stopped = True
        if self._taking is not None:
            self._taking.reschedule(asyncio.get_running_loop().time())
        calls = [task for task in self._calls if task.cancel()]
        if calls:
            async with deadline(self._rollouts.timeout_s, "the end of cancelled rollouts"):
                await asyncio.wait(calls)

    def in_flight(self) -> list[Lease]:
        """The leases of calls that run."""
        return [lease for task, leases in self._calls.items() if not task.done() for lease in leases]

    async def _add(self, tasks: asyncio.TaskGroup, prompts: Sequence[PromptRef]) -> None:
        """Add prompts to the buffer and begin to wait for their permits, except for those whose
        groups are from before a restart.
        """
        self.prompts |= {prompt.uid: prompt.row for prompt in prompts}
        there = await self._rollouts.reuse(self._partition.name, prompts)
        self._version |= there
        new = [prompt for prompt in prompts if prompt.uid not in there]
        uids = [prompt.uid for prompt in new]
        await self._buffer.add(uids, [prompt.sessions or self._partition.n for prompt in new])
        if not uids:
            return
        if self._rollouts.policy.max_inflight:
            self._permitted += [({uid}, tasks.create_task(self._dispatch(tasks, {uid}))) for uid in uids]
        elif not self._permitted:
            self._permitted.append((self.prompts, tasks.create_task(self._dispatch(tasks, self.prompts))))

    def _end(self, uids: set[str]) -> None:
        """Give the permits of prompts back, all of which were taken or discarded."""
        for permit, task in self._permitted:
            if uids.issuperset(permit):
                task.cancel()
        self._permitted = [(permit, task) for permit, task in self._permitted if not uids.issuperset(permit)]

    async def _dispatch(self, tasks: asyncio.TaskGroup, uids: Collection[str]) -> None:
        """Wait for a permit, and send these prompts to the replicas whenever some may start."""
        permits = self._rollouts.permits[self._partition.name]
        await permits.acquire(self._partition.step)
        try:
            while True:
                with suppress(PlaneTimeout):  # nothing may start; `_take` has the deadline
                    await self._start(tasks, await self._buffer.pending(uids, timeout_s=self._deadline_s))
        finally:
            permits.release()

    async def _start(self, tasks: asyncio.TaskGroup, uids: Sequence[str]) -> None:
        """Lease prompts with the version of the replicas, and begin to roll them out."""
        rollouts = self._rollouts
        await rollouts.gate.enter()
        try:
            leases = await self._buffer.lease(
                len(uids), version=rollouts.version, timeout_s=self._deadline_s, uids=uids
            )
        except BaseException:
            rollouts.gate.leave()
            raise
        self._attempt |= {lease.uid: lease.attempt for lease in leases}
        self._version |= {lease.uid: lease.version for lease in leases}
        prompts = tuple(LeasedPrompt(lease, self.prompts[lease.uid]) for lease in leases)
        task = tasks.create_task(self._run_call(RolloutCall(partition=self._partition, prompts=prompts)))
        task.add_done_callback(lambda _: rollouts.gate.leave())
        self._calls[task] = leases

    async def _run_call(self, whole: RolloutCall) -> None:
        rollouts = self._rollouts
        if rollouts.policy.max_inflight:
            router, cost = rollouts.shared_router, num_sessions(whole.prompts)
            replica = router.choose(f"{self._partition.split}/{whole.prompts[0].row}", cost)
            try:
                await self._send(replica, whole)
            finally:
                router.done(replica, cost)
        else:
            await roll_out(len(rollouts.workers), whole, rollouts.router, self._send)

    async def _send(self, replica: int, part: RolloutCall) -> RolloutResult:
        """Call a replica; if it fails, settle its sessions with that error.

        The death of its process is not a failure of its prompts: it ends the rollout.
        """
        worker, timeout_s = self._rollouts.workers[replica], self._rollouts.timeout_s
        self._generating += 1
        try:
            result = await call(worker, "rollout", part, RolloutResult, timeout_s)
        except (ConfigError, DataLostError, WorkerDiedError):
            raise
        except RLError as error:
            self._errors.append(error)
            reason = f"{worker.name}: {error}"
            leases = [prompt.lease for prompt in part.prompts]
            failed = [SessionResult(lease, session, error=reason) for lease in leases for session in lease.sessions]
            await settle(self._rollouts.plane, failed, timeout_s=timeout_s)
            return RolloutResult()
        finally:
            self._generating -= 1
        self._tokens[replica] += result.tokens
        if self._generated is not None and self._generating and result.single:
            leases = [prompt.lease for prompt in part.prompts]
            keys = [key_text(lease.uid, session, 0) for lease in leases for session in lease.sessions]
            await self._generated(KVBatchMeta(partition=self._partition.name, keys=tuple(keys)))
        return result

    async def _take_all(self, tasks: asyncio.TaskGroup, count: int, spare: Spare | None) -> KVBatchMeta | None:
        """Take the groups, each permit's together; None: the rollout was stopped."""
        size = self._rollouts.policy.prompts_per_call(count)
        parts: list[KVBatchMeta] = []
        for _ in range(count // size):
            part = await self._take(tasks, size, count, spare)
            if part is None:
                return None
            parts.append(part)
            self._end(set(map(str, part.tag_values("uid"))))
        return join_rows(parts)

    async def _take(self, tasks: asyncio.TaskGroup, count: int, asked: int, spare: Spare | None) -> KVBatchMeta | None:
        """Take groups; replace prompts that failed. None: the rollout was stopped.

        At most as many prompts are replaced as were asked for: a rollout that always fails must
        end.
        """
        while not self._stopped:
            try:
                async with asyncio.timeout(None) as self._taking:  # `stop` ends it
                    return await self._buffer.take(
                        count, version=self._rollouts.version, timeout_s=self._deadline_s, uids=self.prompts
                    )
            except TimeoutError:
                if self._stopped:
                    return None
                raise  # the buffer's deadline
            except RolloutError as error:
                failed = [uid for uid in self._buffer.failed() if uid in self.prompts]
                if spare is None or not failed or self._replaced + len(failed) > asked:
                    raise (self._errors[0] if self._errors and spare is None else error) from None
            finally:
                self._taking = None
            self._replaced += len(failed)
            await self._buffer.discard(failed)
            self._discarded.update(failed)
            await self._add(tasks, spare(len(failed)))
            self._end(set(failed))
        return None
