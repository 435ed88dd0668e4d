"""The DataPlane port: rows of named columns, addressed by partition and key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Scalar, Tag
from rl_protocol.batch.schema import ColumnSpec
from rl_protocol.wire.draft import Draft


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes transferred by one client since it was opened."""

    control_sent: int = 0
    control_received: int = 0
    data_written: int = 0
    """Payload bytes that this client put."""
    data_read: int = 0
    """Payload bytes that this client got."""

    @property
    def total(self) -> int:
        return self.control_sent + self.control_received + self.data_written + self.data_read


class PlaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """Current contents of a plane."""

    rows: Mapping[str, int]
    """partition -> number of rows."""
    bytes_used: int
    """Payload bytes held, including alignment."""
    bytes_capacity: int
    """Most bytes it may hold; 0: unlimited."""
    bytes_reserved: int = 0
    """Bytes reserved by producers and not put yet."""
    lost: Mapping[str, tuple[str, ...]] = {}
    """partition -> keys of rows that still exist but lost columns with a storage unit."""
    columns: Mapping[str, tuple[str, ...]] = {}
    """partition -> columns that any row has or had."""
    tasks: Mapping[str, tuple[str, ...]] = {}
    """partition -> tasks that consumed rows."""
    links: Mapping[str, int] = {}
    """Kind of link -> payload bytes that all clients have put and got through it, as far as their
    requests have said so."""
    damaged: int = 0
    """Blocks that were found damaged in memory and were read again from the journal."""
    evicted: int = 0
    """Blocks whose rows left memory for others; the journal has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChanges:
    """Changes to the rows of a partition since some version."""

    rows: KVBatchMeta
    """New and changed rows, least recent change first."""
    removed: tuple[str, ...]
    """Rows that were cleared, or changed and do not match the filter (any more)."""
    version: int
    """Pass this as `since` in the next call."""
    reset: bool
    """`rows` is the complete list: forget all other rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFlags:
    """One flag per row of a partition, oldest row first."""

    keys: tuple[str, ...]
    flags: npt.NDArray[np.bool_]
    """bool [N], or [N, F] for F columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowHosts:
    """How many bytes of each row lie on which host."""

    hosts: tuple[str, ...]
    """[H] names of hosts, as `rl_protocol.support.host_identity.this_host` gives them."""
    nbytes: npt.NDArray[np.int64]
    """[N, H] payload bytes, including alignment. Rows that were put together have equal parts of
    them.
    """


@runtime_checkable
class DataPlane(Protocol):
    """Rows of named columns, addressed by partition and key.

    The first put of a key creates its row; later puts, possibly by other workers, add columns. A
    column that is put again replaces the old one. Tags are merged and the later value wins. A put
    stores everything or nothing. Reading a missing row or column is an error.
    """

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | Draft | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        expect: Sequence[Tag | None] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Store columns and tags of rows.

        Args:
            partition: the partition of the rows.
            keys: [N] keys of the rows.
            data: N rows in the order of `keys`, or None to put only tags. A draft made by `alloc`
                is stored without a copy and can't be used again.
            tags: [N] tags to merge into those of the rows. Numbers may be infinite but not NaN.
            expect: [N] tags that the rows must have now; None: the row must not exist.
            timeout_s: deadline.

        Returns:
            The rows with the tags and columns given in this call.

        Raises:
            BatchError: `data` or `tags` do not have one entry per key, or a tag has an illegal
                value; names row and tag.
            DuplicateKeyError: a key occurs twice.
            ConflictError: a row is not as expected; nothing was stored.
            CapacityTimeout: the plane was full until the deadline; nothing was stored.
            PlaneTimeout: the deadline passed. The put is idempotent and may be repeated.
            PlaneLostError: the plane is gone. The put is idempotent and may be repeated.
        """
        ...

    async def alloc(
        self,
        columns: Iterable[ColumnSpec],
        rows: int,
        lengths: Mapping[str, Sequence[int]] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Draft:
        """Allocate memory of the plane, to be filled in place and put without a copy.

        Args:
            columns: the columns; object columns are not supported because their size is unknown.
            rows: number of rows N.
            lengths: [N] row lengths of every ragged column.
            timeout_s: deadline.

        Raises:
            BatchError: the lengths do not match the columns, or there is an object column.
            CapacityTimeout: the plane was full until the deadline.
        """
        ...

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float = 60.0
    ) -> BatchData:
        """Columns `fields` (default: `meta.fields`) of the rows, in the order of `meta.keys`.

        Raises:
            MissingDataError: names the missing rows or columns; nothing is returned. A row that was
                cleared and put again since `meta` was made counts as missing.
            DataLostError: they were lost with a storage unit.
            CapacityTimeout: rows that are on a disk alone found no memory until the deadline.
        """
        ...

    async def wait_ready(
        self,
        partition: str,
        *,
        count: int,
        fields: Sequence[str] = (),
        where: Mapping[str, Scalar] | None = None,
        task: str | None = None,
        timeout_s: float,
    ) -> KVBatchMeta:
        """Wait for `count` rows that have all `fields` and match `where`; return the oldest.

        With `task`, the rows are marked consumed by that task and no client gets them for it again.
        The wait does not poll.

        Raises:
            PlaneTimeout: says how many rows were ready.
        """
        ...

    async def claim(self, partition: str, keys: Sequence[str], *, task: str, timeout_s: float = 60.0) -> KVBatchMeta:
        """Mark exactly these rows as consumed by `task`, or none of them.

        Raises:
            ConflictError: a row is already consumed; names it.
            MissingDataError: a row does not exist.
        """
        ...

    async def list_rows(
        self,
        partition: str,
        *,
        where: Mapping[str, Scalar] | None = None,
        fields: Sequence[str] = (),
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """List rows that match `where`, have all `fields` and are not consumed by `task`.

        The oldest row comes first.

        With `keys`, only those rows are considered and the result has their order. The `fields` of
        the result are the columns that every row has. Nothing is consumed.

        Raises:
            MissingDataError: one of `keys` does not exist.
        """
        ...

    async def watch(
        self, partition: str, *, since: int = 0, where: Mapping[str, Scalar] | None = None, timeout_s: float
    ) -> RowChanges:
        """Wait, without polling, for changes to the partition after version `since`.

        `since=0` returns all rows immediately. If the deadline passes, the result has no changes
        and the same version.
        """
        ...

    async def consumption_status(self, partition: str, *, task: str, timeout_s: float = 60.0) -> RowFlags:
        """Which rows `task` has consumed: flags [N]."""
        ...

    async def production_status(self, partition: str, *, fields: Sequence[str], timeout_s: float = 60.0) -> RowFlags:
        """Which rows have which of the columns: flags [N, F]."""
        ...

    async def row_hosts(self, partition: str, keys: Sequence[str], *, timeout_s: float = 60.0) -> RowHosts:
        """Where the columns of rows are, in the order of `keys`.

        Raises:
            MissingDataError: one of `keys` does not exist.
        """
        ...

    async def reset_consumption(
        self,
        partition: str,
        *,
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> int:
        """Make rows (default: all) available to `task` (default: every task) again.

        Returns:
            How many had been consumed.
        """
        ...

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
        """Remove the given rows, or the whole partition; return how many existed."""
        ...

    async def unload(self, partition: str, keys: Sequence[str], *, timeout_s: float = 60.0) -> None:
        """Free the memory of rows that will hardly be read, where the plane has them on a disk as
        well: the next read fetches them from there. Otherwise nothing happens. Unknown rows are
        ignored.
        """
        ...

    async def stats(self, *, timeout_s: float = 60.0) -> PlaneStats:
        """Current contents of the plane."""
        ...

    def traffic(self) -> Traffic:
        """Bytes transferred by this client so far."""
        ...

    async def close(self) -> None:
        """Release the client's resources; safe to call twice. The plane itself keeps running."""
        ...
