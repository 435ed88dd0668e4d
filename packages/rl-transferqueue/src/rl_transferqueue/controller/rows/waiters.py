"""Callers that wait for rows, or for changes, of a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rl_protocol.batch.kv_batch_meta import Scalar
from rl_transferqueue.controller.rows.all_partitions import Partitions
from rl_transferqueue.controller.rows.partition_rows import PartitionTable, describe_rows
from rl_transferqueue.wire.arrays import Bools, Ints
from rl_transferqueue.wire.messages import Changes, Rows

_NONE: Ints = np.zeros(0, np.int64)


@dataclass(eq=False, kw_only=True, slots=True)
class Waiter:
    """A caller that waits for `count` rows; `ready` of them are ready.

    `token` belongs to the caller.
    """

    partition: str
    count: int
    fields: tuple[str, ...]
    where: Mapping[str, Scalar]
    task: str | None
    token: object
    ready: int = 0


@dataclass(eq=False, kw_only=True, slots=True)
class Watcher:
    """A caller that waits for changes after version `since`. `token` belongs to the caller."""

    partition: str
    since: int
    where: Mapping[str, Scalar]
    token: object


Served: TypeAlias = list[tuple[Waiter, Rows] | tuple[Watcher, Changes]]
"""Callers whose wait has ended, and their answers."""


@dataclass(slots=True)
class _Waiting:
    """Who waits at one partition."""

    waiters: list[Waiter] = field(default_factory=list[Waiter])
    watchers: list[Watcher] = field(default_factory=list[Watcher])


class Waiters:
    """Waiters and watchers by partition, in order of arrival.

    A change of rows takes two calls: `count_ready` before it, `serve` after it. So a waiter costs
    the rows that change, and not the rows that are there.
    """

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._waiting: dict[str, _Waiting] = {}

    def wait(self, waiter: Waiter) -> Rows | None:
        """The rows if they are there; else the waiter is kept and served by a later change."""
        table = self._partitions.get(waiter.partition)
        slots = table.find_ready(waiter.fields, waiter.where, waiter.task, waiter.count)
        if slots.size >= waiter.count:
            return self._hand_out(waiter, table, slots)
        waiter.ready = int(slots.size)
        self._waiting.setdefault(waiter.partition, _Waiting()).waiters.append(waiter)
        return None

    def watch(self, watcher: Watcher) -> Changes | None:
        """The changes if there are any; else the watcher is kept and served by a later change."""
        changes = self.changes(watcher)
        if watcher.since == 0 or changes.reset or changes.removed or changes.rows.keys:
            return changes
        self._waiting.setdefault(watcher.partition, _Waiting()).watchers.append(watcher)
        return None

    def changes(self, watcher: Watcher) -> Changes:
        """What changed after the watcher's version; there may be nothing."""
        since, version = watcher.since, self._partitions.version
        table = self._partitions.find(watcher.partition)
        if table is None:
            reset = since == 0 or self._partitions.emptied_after(watcher.partition, since)
            return Changes(describe_rows(PartitionTable(), _NONE), (), version if reset else since, reset)
        if since >= table.changes.version:
            return Changes(describe_rows(table, _NONE), (), since, reset=False)
        slots, removed, reset = table.changes_since(since)
        shown = table.ready(slots, (), watcher.where, None) if watcher.where else np.ones(slots.size, np.bool_)
        hidden = () if reset else table.keys(slots[~shown])
        return Changes(describe_rows(table, slots[shown]), (*removed, *hidden), version, reset)

    def forget(self, who: Waiter | Watcher) -> None:
        """The caller waits no more; nothing happens if it was served."""
        waiting = self._waiting.get(who.partition)
        if waiting is None:
            return
        if isinstance(who, Waiter):
            waiting.waiters = [other for other in waiting.waiters if other is not who]
        else:
            waiting.watchers = [other for other in waiting.watchers if other is not who]
        if not waiting.waiters and not waiting.watchers:
            del self._waiting[who.partition]

    # -- around a change
    def count_ready(
        self, partition: str, table: PartitionTable, slots: Ints, but: Bools | None = None
    ) -> dict[Waiter, int]:
        """For each waiter, how many of the rows are ready now; those marked in `but` do not
        count."""
        counts: dict[Waiter, int] = {}
        if partition not in self._waiting:
            return counts
        for waiter in self._waiting[partition].waiters:
            ready = table.ready(slots, waiter.fields, waiter.where, waiter.task)
            counts[waiter] = int(np.count_nonzero(ready if but is None else ready & ~but))
        return counts

    def serve(self, partition: str, table: PartitionTable, slots: Ints, before: Mapping[Waiter, int]) -> Served:
        """The rows have changed since `count_ready` returned `before`: serve who has enough, in
        order of arrival."""
        if partition not in self._waiting:
            return []
        for waiter, count in self.count_ready(partition, table, slots).items():
            waiter.ready += count - before[waiter]
        served: Served = []
        for waiter in list(before):
            if waiter.ready >= waiter.count:
                self.forget(waiter)
                oldest = table.find_ready(waiter.fields, waiter.where, waiter.task, waiter.count)
                served.append((waiter, self._hand_out(waiter, table, oldest)))
        return served + self.serve_watchers(partition)

    def serve_watchers(self, partition: str) -> Served:
        """Serve the watchers that see a change of rows."""
        served: Served = []
        if partition not in self._waiting:
            return served
        for watcher in list(self._waiting[partition].watchers):
            changes = self.changes(watcher)
            if changes.reset or changes.removed or changes.rows.keys:
                self.forget(watcher)
                served.append((watcher, changes))
        return served

    def recount(self, partition: str, table: PartitionTable) -> None:
        """Count the ready rows of each waiter again, in the whole partition."""
        if partition in self._waiting:
            for waiter in self._waiting[partition].waiters:
                waiter.ready = int(table.find_ready(waiter.fields, waiter.where, waiter.task).size)

    # -- consumption
    def consume(self, partition: str, table: PartitionTable, slots: Ints, task: str) -> None:
        """Mark rows as consumed: they are not ready any more for waiters of the task."""
        before = self.count_ready(partition, table, slots)
        table.consumption.mark(slots, task, True)
        for waiter, count in before.items():
            if waiter.task == task:
                waiter.ready -= count

    def unconsume(
        self, partition: str, table: PartitionTable, slots: Ints, tasks: Sequence[str]
    ) -> tuple[Ints, Served]:
        """Mark rows as not consumed; returns the slots of those that were, and callers that are
        served by it."""
        before = self.count_ready(partition, table, slots)
        consumed = np.zeros(slots.size, np.bool_)
        for task in tasks:
            consumed |= table.consumption.consumed(slots, task)
            table.consumption.mark(slots, task, False)
        return slots[consumed], self.serve(partition, table, slots, before)

    def _hand_out(self, waiter: Waiter, table: PartitionTable, slots: Ints) -> Rows:
        if waiter.task is not None and slots.size:
            self.consume(waiter.partition, table, slots, waiter.task)
        return describe_rows(table, slots)
