"""What a journal takes and gives back, and its interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

Block: TypeAlias = bytes | bytearray | memoryview


class Origin(NamedTuple):
    """The request of a put: whether it was made can be asked later."""

    session: bytes
    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRecord:
    """The rows of one put. Several puts may write columns of the same rows.

    Attributes:
        generations: one number per row, unique in the plane.
        header, tags: stored as they are.
        columns: column name -> its contiguous bytes.
        origin: where it comes from; None: no caller can ask for its outcome.
    """

    partition: str
    keys: tuple[str, ...]
    generations: tuple[int, ...]
    header: bytes = b""
    tags: bytes = b""
    columns: Mapping[str, Block] = field(default_factory=dict[str, Block])
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class ClearRecord:
    """These rows are gone; generations that the journal does not hold are ignored."""

    generations: tuple[int, ...]


Record: TypeAlias = PutRecord | ClearRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What a recovery found.

    Attributes:
        rows_kept: rows whose every put was read and verified.
        rows_incomplete: generations of rows that lost at least one put to a missing segment or a
            wrong digest. Their other puts are returned.
        bytes_cut: bytes after the last acknowledged block of a segment.
        segments_removed: segments that no acknowledged row refers to.
    """

    rows_kept: int
    rows_incomplete: tuple[int, ...]
    bytes_cut: int
    segments_removed: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The puts that are needed, in the order of their appends, and the report.

    The puts come without their columns, which `Journal.find` and `Journal.read` return. A put is
    kept whole until each of its rows is cleared, or has all of its columns and tags from later
    puts; so the first put of a row may come after those of younger rows. `cleared` holds the rows
    of these puts that are cleared. `answers` has the
    generations of the rows of the last puts with an origin, as `arrays.pack_ints` packs them, also
    of rows that were cleared since; `last_generation` is the largest of all puts ever.
    """

    puts: tuple[PutRecord, ...]
    cleared: frozenset[int]
    report: RecoveryReport
    answers: Mapping[Origin, bytes] = field(default_factory=dict[Origin, bytes])
    last_generation: int = 0


class FoundPut(NamedTuple):
    """A put with columns, and the later puts that have columns of its rows. All come without the
    bytes of their columns."""

    number: int
    """Names the put for `Journal.read`; later puts have larger numbers."""
    put: PutRecord
    nbytes: int
    """Bytes of its columns."""
    later: tuple[PutRecord, ...]


class Journal(Protocol):
    """Keeps records. All calls come from the thread that opened it."""

    def append(self, records: Sequence[Record]) -> None:
        """Take records, all or none. They are durable once `sync` has returned.

        Raises:
            OutputError: the disk is full (nothing was taken, and the journal can be used on), or an
                earlier write or sync failed.
        """
        ...

    def sync(self) -> None:
        """Make all appended records durable in one commit.

        Raises:
            OutputError: the disk failed. It is unknown which records are durable; the journal
                refuses every further call but `close`.
        """
        ...

    def recover(self) -> Recovered:
        """Read what is durable, verify it and remove the rest. Call it once, before any append."""
        ...

    def find(self, generations: Collection[int], wanted: Callable[[PutRecord], bool]) -> tuple[FoundPut, ...]:
        """The puts with columns of these rows, in the order of their appends.

        Args:
            generations: of the rows.
            wanted: whether a put, which comes without its columns, is to be returned; a pure
                function.

        Raises:
            OutputError: the disk failed.
        """
        ...

    def read(self, numbers: Collection[int]) -> Mapping[int, Mapping[str, Block] | None]:
        """The columns of puts by their numbers; None: bytes are missing or damaged, or the journal
        no longer has the put.

        Raises:
            OutputError: the disk failed.
        """
        ...

    def compact(self) -> int:
        """Rewrite the puts of segments that have become mostly dead; returns the segments removed.
        Costs nothing where no put was cleared or replaced."""
        ...

    def close(self) -> None:
        """Release the files; records that were not synced are lost."""
        ...
