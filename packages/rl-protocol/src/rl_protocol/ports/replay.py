"""The ReplayBuffer port: groups of rollouts between prompts and training, and the worker's side.

Rollout workers need only a DataPlane: they put the trajectories of the sessions that they were
leased, and settle these sessions. The owner of the buffer is one process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol, runtime_checkable

import msgspec

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Tag
from rl_protocol.batch.row_key import RowKey
from rl_protocol.errors import BatchError, ConflictError
from rl_protocol.ports.data_plane import DataPlane
from rl_protocol.support.fault_points import FaultPoint, reach

GroupStatus = Literal["pending", "running", "finished", "failed", "taken"]
Outcome = Literal["retried", "partial", "failed"]
SETTLED_SUFFIX = "/settled"
"""The rows of settled sessions are in the partition named like that of their trajectories, plus
this suffix."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Makes one worker responsible for settling each session of one group."""

    partition: str
    """The partition for the trajectories."""
    uid: str
    """Name of the prompt."""
    attempt: int
    """How often the group was started before."""
    sessions: tuple[int, ...]
    """Session numbers; no other lease of this prompt has them."""
    version: int
    """Policy version to generate with."""
    seconds: float
    """Seconds that the lease lasts."""

    @property
    def tags(self) -> Tag:
        """Tags that every trajectory of the lease must have; its `version` may be another."""
        return {"uid": self.uid, "attempt": self.attempt, "version": self.version}


@dataclass(frozen=True, slots=True)
class SessionResult:
    """How one session of a lease ended: with at least one trajectory, or with an error."""

    lease: Lease
    session: int
    rows: int = 0
    """Number of its trajectories."""
    error: str = ""
    """Why it has none."""

    @property
    def keys(self) -> list[str]:
        """Keys of its trajectories."""
        return [RowKey(self.lease.uid, self.session, i).text for i in range(self.rows)]


async def settle(
    plane: DataPlane,
    results: Sequence[SessionResult],
    rows: BatchData | None = None,
    *,
    tags: Sequence[Tag] | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Store the trajectories of sessions, and that these sessions have ended.

    Trajectories are stored under the keys of the results, with `tags` and the tags of the lease. A
    session counts once all its rows are stored. Rows that arrive after the end of their lease are
    cleared by the owner. May be repeated. An error never replaces what is stored already: a worker
    may die after it has settled its sessions, and before its caller has the answer.

    Args:
        plane: where the trajectories go.
        results: the sessions, all of one partition.
        rows: N trajectories, in the order of `results`; None: no session has one, or the caller
            has stored them with these keys and tags.
        tags: [N] tags of the trajectories.
        timeout_s: deadline of each put.

    Raises:
        BatchError: a session has neither rows nor an error, or both; its lease does not have it;
            the rows are not as many as the results say; or there are several partitions.
    """
    _check(results, None if rows is None else len(rows))
    if not results:
        return
    partition = results[0].lease.partition
    if rows is not None and len(rows):
        named = [(result.lease, key) for result in results for key in result.keys]
        keys = [key for _, key in named]
        own = tags if tags is not None else [{}] * len(named)
        merged = [lease.tags | tag for (lease, _), tag in zip(named, own, strict=True)]
        await plane.put(partition, keys, rows, tags=merged, timeout_s=timeout_s)
    reach(FaultPoint.SESSIONS_STORED)
    runs, settled = _runs(results), partition + SETTLED_SUFFIX
    if good := [_settled_row(run) for run in runs if run[0].rows]:
        await plane.put(settled, [key for key, _ in good], tags=[tag for _, tag in good], timeout_s=timeout_s)
    for key, tag in [_settled_row(run) for run in runs if not run[0].rows]:
        with suppress(ConflictError):
            await plane.put(settled, [key], tags=[tag], expect=[None], timeout_s=timeout_s)
    reach(FaultPoint.SESSIONS_SETTLED)


def _check(results: Sequence[SessionResult], rows: int | None) -> None:
    for result in results:
        lease, session = result.lease, result.session
        if (result.rows > 0) == bool(result.error) or session not in lease.sessions:
            raise BatchError(
                f"Session {session} of {lease.uid!r} (sessions {lease.sessions}) must settle with at least 1 row or "
                f"with an error; got {result.rows} rows and error {result.error!r}."
            )
    partitions = sorted({result.lease.partition for result in results})
    if len(partitions) > 1 or rows not in (None, sum(result.rows for result in results)):
        raise BatchError(
            f"Sessions that settle together must have one partition and as many rows as their results say "
            f"({sum(result.rows for result in results)}); got {rows} rows and partitions {partitions}."
        )


def _runs(results: Sequence[SessionResult]) -> list[list[SessionResult]]:
    """Sessions of one lease that follow each other and ended alike; they share a settled row."""
    places = groupby(enumerate(results), lambda item: (item[1].lease, item[1].session - item[0], *_end(item[1])))
    return [[result for _, result in run] for _, run in places]


def _end(result: SessionResult) -> tuple[int, str]:
    return result.rows, result.error


def _settled_row(run: Sequence[SessionResult]) -> tuple[str, Tag]:
    first = run[0]
    uid, attempt = first.lease.uid, first.lease.attempt
    tag: Tag = {
        "uid": uid,
        "attempt": attempt,
        "session": first.session,
        "sessions": len(run),
        "rows": first.rows,
        "reason": first.error,
    }
    return f"{uid}/{attempt}/{first.session}", tag


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFailure:
    """One attempt at a group in which sessions failed, or did not settle before the lease ended."""

    uid: str
    attempt: int
    """0: the first."""
    sessions: int
    """How many sessions have no trajectory."""
    reason: str
    """Why, of the last of them."""
    outcome: Outcome
    """retried: the group starts again. partial: the group is finished with its other sessions.
    failed: `take` raises until the group is discarded."""


@runtime_checkable
class ReplayBuffer(Protocol):
    """Groups of rollouts, one group per prompt, in a partition of a data plane; the owner's side.

        add -> pending -> running -> finished -> taken -> committed
                  ^          |           |
                  +--retry---+--too old--+        any status -> discarded

    A group is leased as a whole, finished when every session has settled or the lease has ended,
    and taken as a whole, never partly. What happens to a group with failed sessions is a setting of
    the implementation.
    """

    async def add(self, uids: Sequence[str], size: int | Sequence[int]) -> None:
        """Add prompts with `size` sessions each, or with a size for each.

        Raises:
            BatchError: a uid is already there or occurs twice, a size is below 1, or the sizes are
                not as many as the prompts; nothing is added.
        """
        ...

    async def pending(self, uids: Collection[str], *, timeout_s: float) -> list[str]:
        """Wait until some of these prompts are pending; returns them, oldest first.

        Raises:
            PlaneTimeout: none is pending before the deadline; the message has the counts by status.
        """
        ...

    async def lease(
        self, count: int, *, version: int, timeout_s: float, uids: Collection[str] | None = None
    ) -> list[Lease]:
        """Lease up to `count` prompts to roll out with policy `version`, oldest first.

        Waits until at least one may start. With `uids`, leases none but these.

        Raises:
            PlaneTimeout: none may start before the deadline; the message has the counts by status.
            BatchError: the count is below 1.
        """
        ...

    async def take(
        self, count: int, *, version: int, timeout_s: float, uids: Collection[str] | None = None
    ) -> KVBatchMeta:
        """Take the `count` oldest finished groups to train policy `version`.

        With `uids`, takes none but these, and no other failed group raises. If another call names a
        newer version during the wait, the groups are taken for that version.

        Returns:
            The trajectories of whole groups, session by session, with tags.

        Raises:
            PlaneTimeout: too few groups before the deadline; the message has the counts by status.
            RolloutError: a group has failed; it is never skipped silently. See `discard`.
            BatchError: the version is older than a previous one, or the count is below 1.
        """
        ...

    async def commit(self, uids: Sequence[str]) -> None:
        """Clear taken groups, and all their rows, after they were trained on.

        Raises:
            BatchError: a group is not taken; nothing is cleared.
        """
        ...

    async def discard(self, uids: Sequence[str]) -> None:
        """Give groups up, in any status: clear them and all their rows.

        Of a running group, sessions that settle later are refused: their rows are cleared, too.

        Raises:
            BatchError: a group is not there; nothing is cleared.
        """
        ...

    async def clear(self) -> None:
        """Clear all groups and rows, in any status, and the failures."""
        ...

    def counts(self) -> Mapping[GroupStatus, int]:
        """Number of groups by status; any thread may ask."""
        ...

    def statuses(self) -> Mapping[str, GroupStatus]:
        """Status of each group by uid, in the order of adding; any thread may ask."""
        ...

    def unsettled(self) -> Mapping[str, Sequence[int]]:
        """Sessions of running groups that have not settled, by uid; any thread may ask."""
        ...

    def failed(self) -> Mapping[str, str]:
        """Reasons of the failed groups, by uid."""
        ...

    def failures(self) -> Sequence[GroupFailure]:
        """Failed attempts since the last call, the oldest first."""
        ...
