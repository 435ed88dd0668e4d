"""The replay buffer: prompt groups between rollout and training, kept in a plane so that a restart finds them again.

The owner (one process) leases prompts to workers and takes whole groups; workers put what they generate and settle each session. Nobody polls:
settling is a row in the plane, which the owner waits for. Three partitions are used: `p` for trajectories, `p/groups` for the state of each
prompt (as tags), `p/settled` for one row per ended session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar, cast

from rl_protocol.batch import BatchData
from rl_protocol.errors import BatchError, PlaneTimeout
from rl_protocol.keys import RowKey
from rl_protocol.meta import KVBatchMeta, Scalar, Tag
from rl_protocol.ports import DataPlane
from rl_transferqueue.groups import Group, GroupBook, Lease, ReplayConfig, Status

T = TypeVar("T")

_TASK = "replay"


def _groups(partition: str) -> str:
    return f"{partition}/groups"


def _settled(partition: str) -> str:
    return f"{partition}/settled"


async def settle(
    plane: DataPlane,
    lease: Lease,
    session: int,
    rows: BatchData | None = None,
    *,
    tags: Sequence[Tag] | None = None,
    error: str = "",
    timeout_s: float = 60.0,
) -> None:
    """Called by the worker that holds a lease, once per session: here are its trajectories, or the reason why there are none.

    Row i is stored under `RowKey(uid, session, i)`, with the given tags besides `uid`, `attempt` and `version`. The session counts once all of
    its rows are stored; what comes after the end of the lease is cleared by the owner. May be repeated.

    Raises:
        BatchError: neither rows nor an error, or both; a session that the lease does not name.
    """
    count = len(rows) if rows is not None else 0
    if bool(count) == bool(error) or session not in lease.sessions:
        raise BatchError(
            f"Session {session} of {lease.uid!r} (sessions {lease.sessions}) must settle with at least 1 row or with an error; got "
            f"{count} rows and error {error!r}."
        )
    if rows is not None and count:
        common: Tag = {"uid": lease.uid, "attempt": lease.attempt, "version": lease.version}
        keys = [RowKey(lease.uid, session, i).text for i in range(count)]
        own = [common | tag for tag in tags] if tags is not None else [common] * count
        await plane.put(lease.partition, keys, rows, tags=own, timeout_s=timeout_s)
    result: Tag = {
        "uid": lease.uid,
        "attempt": lease.attempt,
        "session": session,
        "rows": count,
        "reason": error,
    }
    key = f"{lease.uid}/{lease.attempt}/{session}"
    await plane.put(_settled(lease.partition), [key], tags=[result], timeout_s=timeout_s)


class ReplayBuffer:
    """The owner's side of a replay buffer; see `rl_transferqueue.groups` for what becomes of a group.

    Lifecycle: `async with ReplayBuffer(plane, "train", config) as buffer`. Entering reads what the plane already holds of this partition; groups
    that were running get a new term, those that were taken and not committed are finished again. One owner at a time. If the plane is lost,
    every wait ends with that error.

    Args:
        plane: where everything is kept; it is not closed.
        partition: trajectories go there.
        config: sizes and policies.
        clock: seconds, for leases.
    """

    def __init__(
        self,
        plane: DataPlane,
        partition: str,
        config: ReplayConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = plane
        self._partition = partition
        self._config = config
        self._clock = clock
        self._book = GroupBook(config, partition)
        self._changed = asyncio.Condition()
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        ended = (await self._plane.list_rows(_settled(self._partition))).tags
        listed = await self._plane.list_rows(_groups(self._partition))
        for order, (uid, tag) in enumerate(zip(listed.keys, listed.tags, strict=True)):
            group = _from_tag(uid, tag, order)
            group.lease_until = self._clock() + self._config.lease_s
            if group.status != "running":  # concluded: not to be judged again
                mine = [t for t in ended if (t["uid"], t["attempt"]) == (uid, group.attempt)]
                group.settled = {cast("int", t["session"]): cast("int", t["rows"]) for t in mine}
            self._book.restore(group)
        for tag in ended:
            await self._count(tag)
        await self._write_down()
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    # -- the owner's calls
    async def add(self, uids: Sequence[str], size: int) -> None:
        """New prompts, each to be rolled out in `size` sessions.

        Raises:
            BatchError: see GroupBook.add.
        """
        async with self._changed:
            for uid in uids:
                self._book.add(uid, size)
            await self._write_down()
            self._changed.notify_all()

    async def lease(self, count: int, *, version: int, timeout_s: float) -> list[Lease]:
        """Up to `count` prompts to be rolled out with policy `version`, oldest first; waits until there is one that may start.

        Raises:
            PlaneTimeout: none until the deadline; says what the others are at.
        """
        return await self._until(
            lambda: self._book.start(count, version, self._clock()) or None,
            lambda leases: [lease.uid for lease in leases],
            f"no prompt of {count} may start",
            timeout_s,
        )

    async def take(self, count: int, *, version: int, timeout_s: float) -> KVBatchMeta:
        """The trajectories of the `count` oldest finished groups, to train policy `version` on: whole groups, session by session.

        Raises:
            PlaneTimeout: too few until the deadline; says what the others are at.
            RolloutError: a group has failed for good; it is never passed over in silence. See `discard`.
        """
        groups = await self._until(
            lambda: self._book.take(count, version),
            lambda taken: [group.uid for group in taken],
            f"fewer than {count} groups can be taken",
            timeout_s,
        )
        keys = [RowKey(g.uid, session, i).text for g in groups for session in g.good for i in range(g.settled[session])]
        return await self._plane.list_rows(self._partition, keys=keys)

    async def commit(self, uids: Sequence[str]) -> None:
        """Groups that were taken and are trained on: they, and all their rows, are cleared.

        Raises:
            BatchError: a group that is not taken.
        """
        await self._forget(uids, "taken")

    async def discard(self, uids: Sequence[str]) -> None:
        """Groups that have failed are given up; they, and all their rows, are cleared.

        Raises:
            BatchError: a group that has not failed.
        """
        await self._forget(uids, "failed")

    def counts(self) -> dict[Status, int]:
        """How many groups there are in each status."""
        return self._book.counts()

    def failed(self) -> dict[str, str]:
        """Groups that have failed, and why."""
        return {uid: group.reason for uid, group in self._book.groups.items() if group.status == "failed"}

    # -- inner
    async def _until(
        self, attempt: Callable[[], T | None], uids: Callable[[T], list[str]], what: str, timeout_s: float
    ) -> T:
        """Try after every change, until the deadline. What the caller does not get, because writing it down failed or it left, is undone."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with self._changed:
            while True:
                self._check_listener()
                result = attempt()
                try:
                    await self._write_down()
                except BaseException:
                    self._book.undo(uids(result) if result is not None else [])
                    raise
                if result is not None:
                    self._changed.notify_all()
                    return result
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
                except TimeoutError:
                    raise PlaneTimeout(
                        f"Replay buffer {self._partition!r}: {what} within {timeout_s:g} s; there are {self.counts()}. Look at the workers, or "
                        "raise the deadline."
                    ) from None

    async def _forget(self, uids: Sequence[str], status: Literal["taken", "failed"]) -> None:
        async with self._changed:
            self._book.forget(uids, status)
            for uid in uids:
                await self._clear_rows({"uid": uid})
            await self._plane.clear(_groups(self._partition), list(uids))
            self._changed.notify_all()

    async def _listen(self) -> None:
        """Count sessions as they settle and conclude leases as they end."""
        try:
            while True:
                now, expiry = self._clock(), self._book.next_expiry()
                # A lease given meanwhile ends later than one term from now, so no end is missed.
                seconds = self._config.lease_s if expiry is None else min(max(0.0, expiry - now), self._config.lease_s)
                ended = KVBatchMeta(partition=_settled(self._partition), keys=())
                with contextlib.suppress(PlaneTimeout):
                    ended = await self._plane.wait_ready(ended.partition, count=1, task=_TASK, timeout_s=seconds)
                async with self._changed:
                    for tag in ended.tags:
                        await self._count(tag)
                    self._book.expire(self._clock())
                    await self._write_down()
                    self._changed.notify_all()
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _check_listener(self) -> None:
        if self._listener is None or self._listener.cancelled():
            raise BatchError("This replay buffer is not open; use it inside `async with`.")
        if self._listener.done():
            self._listener.result()

    async def _count(self, tag: Tag) -> None:
        uid, attempt = cast("str", tag["uid"]), cast("int", tag["attempt"])
        session, rows = cast("int", tag["session"]), cast("int", tag["rows"])
        if not self._book.settle(uid, attempt, session, rows, str(tag["reason"])):
            keys = [RowKey(uid, session, i).text for i in range(rows)]
            await self._plane.clear(self._partition, keys)
            await self._plane.clear(_settled(self._partition), [f"{uid}/{attempt}/{session}"])

    async def _write_down(self) -> None:
        """Bring the plane to the state of the book. An abandoned attempt goes first: cut short here, it is abandoned again later."""
        book = self._book
        while book.abandoned:
            uid, attempt = book.abandoned[0]
            await self._clear_rows({"uid": uid, "attempt": attempt})
            del book.abandoned[0]
        if book.changed:
            groups = [book.groups[uid] for uid in sorted(book.changed, key=lambda u: book.groups[u].order)]
            await self._plane.put(_groups(self._partition), [g.uid for g in groups], tags=[_to_tag(g) for g in groups])
            book.changed -= {group.uid for group in groups}

    async def _clear_rows(self, where: Mapping[str, Scalar]) -> None:
        for partition in (_settled(self._partition), self._partition):
            rows = await self._plane.list_rows(partition, where=where)
            if rows:
                await self._plane.clear(partition, rows.keys)


def _to_tag(group: Group) -> Tag:
    return {
        "size": group.size,
        "status": group.status,
        "attempt": group.attempt,
        "version": group.version,
        "reason": group.reason,
    }


def _from_tag(uid: str, tag: Tag, order: int) -> Group:
    return Group(
        uid=uid,
        size=cast("int", tag["size"]),
        order=order,
        status=cast("Status", tag["status"]),
        attempt=cast("int", tag["attempt"]),
        version=cast("int", tag["version"]),
        reason=str(tag["reason"]),
    )
