"""Declaration: the columns that a worker method reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Tag
from rl_protocol.batch.schema import BatchSchema
from rl_protocol.errors import ConfigError

T_co = TypeVar("T_co", covariant=True)

Names: TypeAlias = Sequence[str] | Callable[[Any], Sequence[str]]
"""Names of columns, or a function from the settings of a run to them."""
Renames: TypeAlias = Mapping[str, str] | Callable[[Any], Mapping[str, str]]
"""Name of a column in the plane -> its name in the method, or a function from settings to these."""

_DECLARED = "__tqbridge__"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The columns that a bridged method reads and writes; a step for `check_flow`.

    Attributes:
        name: of the method.
        reads: the columns that are fetched for it, by their names in the plane.
        writes: the columns that it makes.
        reads_as: name in the plane -> name in the method, of columns whose names differ.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reads_as: Mapping[str, str] = field(default_factory=dict[str, str])

    def rename(self, data: BatchData) -> BatchData:
        """The columns under their names in the method."""
        if not self.reads_as:
            return data
        return BatchData({self.reads_as.get(name, name): column for name, column in data.columns.items()}, len(data))


@dataclass(frozen=True, slots=True)
class Fetched:
    """Rows whose columns were fetched ahead for a bridged method, which takes them as its rows."""

    meta: KVBatchMeta
    declared: Declaration
    data: BatchData


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Generic[T_co]):
    """What a bridged method returns if it has more to return than columns.

    Attributes:
        result: what the caller of the method gets.
        columns: the columns to put; None: none.
        rows: which of the rows they belong to, by number; None: all.
        tags: put with the columns, one per row; None: none.
    """

    result: T_co
    columns: BatchData | None
    rows: Sequence[int] | None = None
    tags: Sequence[Tag] | None = None


@runtime_checkable
class BatchSettings(Protocol):
    """Settings of a run whose columns are not the same for every batch."""

    def for_batch(self, meta: KVBatchMeta, /) -> object:
        """The settings for these rows."""
        ...


@dataclass(frozen=True, slots=True)
class Columns:
    """The arguments of `tqbridge`: a declaration before the settings of the run are known."""

    name: str
    reads: Names
    writes: Names
    reads_as: Renames
    schema: BatchSchema | None

    def of(self, worker: object, meta: KVBatchMeta) -> Declaration:
        """The declaration under `worker.columns`, for these rows."""
        settings = getattr(worker, "columns", None)
        return self.under(settings.for_batch(meta) if isinstance(settings, BatchSettings) else settings)

    def under(self, settings: object) -> Declaration:
        """The declaration under these settings.

        Raises:
            ConfigError: a column is declared twice.
        """
        reads = self.reads(settings) if callable(self.reads) else self.reads
        writes = self.writes(settings) if callable(self.writes) else self.writes
        require_once(reads, writes)
        reads_as = self.reads_as(settings) if callable(self.reads_as) else self.reads_as
        return Declaration(self.name, tuple(reads), tuple(writes), reads_as)


def require_once(*declared: Sequence[str]) -> None:
    """Refuse a column that is declared twice."""
    for names in declared:
        if len(set(names)) != len(names):
            raise ConfigError(f"tqbridge: columns must be declared once; got {list(names)}.")


def declare(bridged: Callable[..., Any], columns: Columns) -> None:
    """Keep the columns with the decorated method."""
    setattr(bridged, _DECLARED, columns)


def columns_of(method: Callable[..., Any]) -> Columns:
    """The columns of a bridged method.

    Raises:
        ConfigError: the method is not bridged.
    """
    found = getattr(method, _DECLARED, None)
    if not isinstance(found, Columns):
        raise ConfigError(
            f"{getattr(method, '__qualname__', method)!r} declares no columns; decorate it with tqbridge."
        )
    return found


def declaration(method: Callable[..., Any], settings: object = None) -> Declaration:
    """The declaration of a bridged method under the settings of a run.

    Raises:
        ConfigError: the method is not bridged, or declares a column twice.
    """
    return columns_of(method).under(settings)
