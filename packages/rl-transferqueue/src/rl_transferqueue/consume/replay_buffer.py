"""The replay buffer: prompt groups between rollout and training, stored in a plane.

One process owns it: it leases prompts to workers and takes whole groups. Workers put trajectories
and settle their sessions (`rl_protocol.ports.settle`), which adds rows that the owner watches. A
restarted owner finds its state in the plane. Partition `p` has the trajectories, `p/groups` the
state of each prompt (as tags), and `p/settled` the ended sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar, cast

from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Scalar, Tag
from rl_protocol.batch.row_key import RowKey
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, PlaneTimeout
from rl_protocol.ports import DataPlane, GroupFailure, GroupStatus, Lease, settle
from rl_protocol.ports.replay import SETTLED_SUFFIX
from rl_protocol.support.fault_points import FaultPoint, lease_clock, reach
from rl_transferqueue.consume.prompt_groups import Group, GroupBook, ReplayConfig

__all__ = ["Lease", "ReplayBuffer", "settle"]
T = TypeVar("T")
U = TypeVar("U")
_CALL_S = 60.0
"""Deadline of a call that does not wait."""


class ReplayBuffer:
    """The owner's side of a replay buffer (`rl_protocol.ports.ReplayBuffer`).

    Lifecycle: `async with ReplayBuffer(plane, "train", config) as buffer`. Entering restores the
    groups of this partition from the plane: leases of running groups start again, groups that were
    taken but not committed become finished, and finished groups of which the plane has lost a row
    become pending. A commit or discard that was interrupted is completed. Only one owner at a time.
    If the plane is lost, every wait raises that error.

    Args:
        plane: stores everything; it is not closed.
        partition: the partition for trajectories.
        config: sizes and policies.
        clock: seconds, for leases.
    """

    def __init__(
        self,
        plane: DataPlane,
        partition: str,
        config: ReplayConfig,
        *,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self._plane = plane
        self._partition = partition
        self._groups = f"{partition}/groups"
        self._settled = partition + SETTLED_SUFFIX
        self._config = config
        self._clock = clock
        self._book = GroupBook(config, partition)
        self._changed = asyncio.Condition()
        self._listener: asyncio.Task[None] | None = None
        self._seen = 0
        """Version up to which settled sessions are counted."""

    async def __aenter__(self) -> Self:
        changes = await self._plane.watch(self._settled, timeout_s=_CALL_S)
        self._seen = changes.version
        results = [_Result.of(tag) for tag in changes.rows.tags]
        listed = await self._plane.list_rows(self._groups)
        for order, (uid, tag) in enumerate(zip(listed.keys, listed.tags, strict=True)):
            group = _from_tag(uid, tag, order)
            group.lease_until = self._clock() + self._config.lease_s
            if group.status != "running":  # already concluded
                own = [one for one in results if (one.uid, one.attempt) == (uid, group.attempt)]
                # the first result of a session is the one that counted
                group.settled = {session: one.rows for one in reversed(own) for session in one.sessions}
            self._book.restore(group)
        for result in results:
            await self._count(result)
        if cleared := self._book.without_sessions():  # an owner has died while it cleared them
            await self._forget(cleared)
        self._book.restart_damaged(frozenset((await self._plane.list_rows(self._partition)).keys))
        await self._save()
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    async def add(self, uids: Sequence[str], size: int | Sequence[int]) -> None:
        """Add prompts with `size` sessions each, or with a size for each; see the port."""
        async with self._changed:
            self._book.add(uids, size)
            await self._save()
            self._changed.notify_all()

    async def pending(self, uids: Collection[str], *, timeout_s: float) -> list[str]:
        """Wait until some of these prompts are pending; see the port."""
        return await self._until(
            lambda: self._book.pending(frozenset(uids)) or None,
            lambda _: [],
            _as_is,
            f"no prompt of {len(uids)} is pending",
            timeout_s,
        )

    async def lease(
        self, count: int, *, version: int, timeout_s: float, uids: Collection[str] | None = None
    ) -> list[Lease]:
        """Lease up to `count` prompts to roll out with policy `version`; see the port."""
        return await self._until(
            lambda: self._book.start(count, version, self._clock(), _as_set(uids)) or None,
            lambda leases: [lease.uid for lease in leases],
            _as_is,
            f"no prompt of {count} may start",
            timeout_s,
        )

    async def take(
        self, count: int, *, version: int, timeout_s: float, uids: Collection[str] | None = None
    ) -> KVBatchMeta:
        """Take the `count` oldest finished groups to train policy `version`; see the port."""
        self._book.check_take(count, version)
        return await self._until(
            lambda: self._book.take(count, max(version, self._book.version), _as_set(uids)),
            lambda taken: [group.uid for group in taken],
            self._rows_of,
            f"fewer than {counted(count, 'group')} can be taken",
            timeout_s,
        )

    async def commit(self, uids: Sequence[str]) -> None:
        """Clear taken groups, and all their rows; see the port."""
        await self._forget(uids, status="taken")

    async def discard(self, uids: Sequence[str]) -> None:
        """Give groups up, in any status; see the port."""
        await self._forget(uids)

    async def clear(self) -> None:
        """Clear all groups and rows, in any status, and the failures."""
        async with self._changed:
            before, self._book = self._book, GroupBook(self._config, self._partition)
            self._book.forgotten = before.forgotten | before.groups.keys()
            await self._clear_partitions()
            self._book.forgotten.clear()
            self._changed.notify_all()

    def counts(self) -> dict[GroupStatus, int]:
        """Number of groups by status; any thread may ask."""
        return self._book.counts()

    def statuses(self) -> dict[str, GroupStatus]:
        """Status of each group by uid; see the port."""
        return self._book.statuses()

    def unsettled(self) -> dict[str, tuple[int, ...]]:
        """Sessions of running groups that have not settled, by uid; any thread may ask."""
        return self._book.unsettled()

    def failed(self) -> dict[str, str]:
        """Reasons of the failed groups, by uid."""
        return {uid: group.reason for uid, group in self._book.groups.items() if group.status == "failed"}

    def failures(self) -> list[GroupFailure]:
        """Failed attempts since the last call, the oldest first."""
        found, self._book.failures = self._book.failures, []
        return found

    async def _rows_of(self, groups: Sequence[Group]) -> KVBatchMeta:
        return await self._plane.list_rows(self._partition, keys=[key for group in groups for key in group.row_keys])

    async def _until(
        self,
        attempt: Callable[[], T | None],
        uids: Callable[[T], list[str]],
        finish: Callable[[T], Awaitable[U]],
        what: str,
        timeout_s: float,
    ) -> U:
        """Try after every change, until the deadline; undo the result if it can't be saved or
        finished, and let others try."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with self._changed:
            while True:
                self._check_listener()
                result = attempt()
                try:
                    await self._save()
                    if result is not None:
                        return await finish(result)
                except BaseException:
                    self._book.undo(uids(result) if result is not None else [])
                    raise
                finally:
                    if result is not None:
                        self._changed.notify_all()
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
                except TimeoutError:
                    raise PlaneTimeout(
                        f"Replay buffer {self._partition!r}: {what} within {timeout_s:g} s; there are {self.counts()}. "
                        "Check the workers, or raise the deadline."
                    ) from None

    async def _forget(self, uids: Sequence[str], status: GroupStatus | None = None) -> None:
        async with self._changed:
            self._book.forget(uids, status)
            self._changed.notify_all()
            await self._clear_forgotten()

    async def _clear_forgotten(self) -> None:
        """Clear groups that have left the book; a later call ends what was interrupted."""
        forgotten = self._book.forgotten
        if forgotten and not self._book.groups:
            await self._clear_partitions()
        elif forgotten:
            await self._clear_rows_of(forgotten)
            await self._plane.clear(self._groups, sorted(forgotten))
        forgotten.clear()

    async def _clear_partitions(self) -> None:
        for partition in (self._settled, self._partition, self._groups):
            await self._plane.clear(partition)

    async def _listen(self) -> None:
        """Count sessions that settle, and conclude groups whose lease ended before the last answer
        of the plane was asked for, so that it has all that settled in time."""
        late = False
        try:
            while True:
                now, expiry = self._clock(), self._book.next_expiry()
                # A lease that starts during the wait ends later than `lease_s` from now.
                seconds = self._config.lease_s if expiry is None else min(max(0.0, expiry - now), self._config.lease_s)
                try:
                    await self._follow(now, 0.0 if late else seconds)
                    late = False
                except PlaneTimeout:  # the controller is slow, or is being replaced: callers have their own deadlines
                    late = True
        finally:
            async with self._changed:
                self._changed.notify_all()

    async def _follow(self, now: float, seconds: float) -> None:
        """Wait for sessions that settle, and count them; repeated after an error, it counts those
        that it has not counted."""
        changes = await self._plane.watch(self._settled, since=self._seen, timeout_s=seconds)
        async with self._changed:
            for tag in changes.rows.tags:
                await self._count(_Result.of(tag))
            self._seen = changes.version
            self._book.expire(now)
            self._changed.notify_all()
            await self._save()

    def _check_listener(self) -> None:
        if self._listener is None or self._listener.cancelled():
            raise BatchError("This replay buffer is not open; use it inside `async with`.")
        if self._listener.done():
            self._listener.result()

    async def _count(self, result: _Result) -> None:
        uid, rows = result.uid, result.rows
        late = self._book.settle(uid, result.attempt, result.sessions, rows, result.reason)
        if self._book.is_over(uid, result.attempt):
            await self._clear_rows({"uid": uid, "attempt": result.attempt})
            return
        if late:
            await self._plane.clear(self._partition, [RowKey(uid, s, i).text for s in late for i in range(rows)])
        if len(late) == len(result.sessions):
            await self._plane.clear(self._settled, [f"{uid}/{result.attempt}/{late[0]}"])

    async def _save(self) -> None:
        """Save the book's changes in the plane.

        What was forgotten or abandoned is cleared first, so that an interrupted save clears it
        again later.
        """
        book = self._book
        await self._clear_forgotten()
        while book.abandoned:
            uid, attempt = book.abandoned[0]
            await self._clear_rows({"uid": uid, "attempt": attempt})
            del book.abandoned[0]
        if book.changed:
            groups = [book.groups[uid] for uid in sorted(book.changed, key=lambda u: book.groups[u].order)]
            await self._plane.put(self._groups, [g.uid for g in groups], tags=[_to_tag(g) for g in groups])
            book.changed -= {group.uid for group in groups}

    async def _clear_rows_of(self, uids: Collection[str]) -> None:
        """Clear what settled of these groups, and then the rows; see `_clear_rows`."""
        if len(uids) == 1:
            await self._clear_rows({"uid": next(iter(uids))})
            return
        for partition in (self._settled, self._partition):
            rows = await self._plane.list_rows(partition)
            keys = [key for key, tag in zip(rows.keys, rows.tags or (), strict=True) if tag["uid"] in uids]
            if keys:
                await self._plane.clear(partition, keys)
            if partition == self._settled:
                reach(FaultPoint.GROUPS_HALF_CLEARED)

    async def _clear_rows(self, where: Mapping[str, Scalar]) -> None:
        """Clear what settled, and then the rows.

        In this order a `settle` that is repeated meanwhile leaves none: either its rows are listed
        here, or it is counted later.
        """
        for partition in (self._settled, self._partition):
            rows = await self._plane.list_rows(partition, where=where)
            if rows:
                await self._plane.clear(partition, rows.keys)


async def _as_is(result: T) -> T:
    return result


def _as_set(uids: Collection[str] | None) -> Collection[str] | None:
    """As they are now: a caller may add to them while it waits."""
    return None if uids is None else frozenset(uids)


@dataclass(frozen=True, slots=True)
class _Result:
    """Sessions of one attempt that ended alike, as `settle` stores them."""

    uid: str
    attempt: int
    sessions: range
    rows: int
    reason: str

    @classmethod
    def of(cls, tag: Tag) -> _Result:
        first, count = cast("int", tag["session"]), cast("int", tag["sessions"])
        return cls(
            uid=cast("str", tag["uid"]),
            attempt=cast("int", tag["attempt"]),
            sessions=range(first, first + count),
            rows=cast("int", tag["rows"]),
            reason=str(tag["reason"]),
        )


def _to_tag(group: Group) -> Tag:
    return {
        "size": group.size,
        "status": "finished" if group.status == "taken" else group.status,
        "attempt": group.attempt,
        "version": group.version,
        "reason": group.reason,
    }


def _from_tag(uid: str, tag: Tag, order: int) -> Group:
    return Group(
        uid=uid,
        size=cast("int", tag["size"]),
        order=order,
        status=cast("GroupStatus", tag["status"]),
        attempt=cast("int", tag["attempt"]),
        version=cast("int", tag["version"]),
        reason=str(tag["reason"]),
    )
