"""tqbridge: worker methods declare the columns they read and write, and the data plane moves them.

class Actor:
    def __init__(self, plane: DataPlane) -> None:
        self.plane = plane

    @tqbridge(reads=("prompts", "responses"), writes=("old_log_probs",))
    async def old_log_prob(self, batch: BatchData, *, temperature: float) -> BatchData: ...

check_flow([declaration(Actor.old_log_prob), ...], given=("prompts", "responses"))  # at start-up
meta = await actor.old_log_prob(meta, temperature=1.0)               # KVBatchMeta in and out
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Tag
from rl_protocol.batch.schema import BatchSchema
from rl_protocol.bridge.declaration import (
    Columns,
    Declaration,
    Fetched,
    Names,
    Output,
    Renames,
    columns_of,
    declare,
    require_once,
)
from rl_protocol.bridge.replicas import Replicas, broadcast, receive
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, RLError, SchemaError
from rl_protocol.ports import DataPlane

Method: TypeAlias = Callable[..., Any]
S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
Rows: TypeAlias = KVBatchMeta | Fetched


class BlockingPlane(Protocol):
    """What a sync method needs of its data plane."""

    def get(self, meta: KVBatchMeta, fields: Sequence[str] | None = None) -> BatchData:
        """See DataPlane.get."""
        ...

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | None = None,
        *,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        """See DataPlane.put."""
        ...


class ReadingBridge(Protocol):
    """`tqbridge` without `writes`: the decorated method takes names and keeps its result."""

    def __call__(
        self, method: Callable[Concatenate[S, BatchData, P], T], /
    ) -> Callable[Concatenate[S, Rows, P], T]: ...


class WritingBridge(Protocol):
    """`tqbridge` with `writes`: the decorated method takes names and returns names, or the result
    of its Output.
    """

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, BatchData, P], Coroutine[Any, Any, BatchData]], /
    ) -> Callable[Concatenate[S, Rows, P], Coroutine[Any, Any, KVBatchMeta]]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[S, BatchData, P], Coroutine[Any, Any, Output[T]]], /
    ) -> Callable[Concatenate[S, Rows, P], Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[S, BatchData, P], BatchData], /
    ) -> Callable[Concatenate[S, Rows, P], KVBatchMeta]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[S, BatchData, P], Output[T]], /
    ) -> Callable[Concatenate[S, Rows, P], T]: ...


@overload
def tqbridge(*, reads: Names = (), reads_as: Renames | None = None) -> ReadingBridge: ...
@overload
def tqbridge(
    *, reads: Names = (), reads_as: Renames | None = None, writes: Names, schema: BatchSchema | None = None
) -> WritingBridge: ...
def tqbridge(
    *,
    reads: Names = (),
    reads_as: Renames | None = None,
    writes: Names = (),
    schema: BatchSchema | None = None,
) -> ReadingBridge | WritingBridge:
    """Decorate a method, sync or async, whose first argument is a BatchData.

    The decorated method takes a KVBatchMeta instead, or what `fetch` returned for it. It gets the
    columns `reads` from `self.plane` (a DataPlane for an async method, a BlockingPlane for a sync
    one). If it declares `writes`, it puts the columns that the method returns, which must be
    exactly `writes` with the same number of rows, and returns the KVBatchMeta with the new fields;
    a method that returns an Output chooses rows, tags and result itself. Otherwise it returns the
    method's result, or that of its Output.

    If `self` has `replicas`, only their leader gets and puts; it broadcasts the columns, or its
    error, to the others.

    Args:
        reads: columns to get. These and the next two are given as names, or as a function of
            `self.columns`, the settings of the run that decide on columns. Where these have
            `for_batch`, it is called with the rows, and its result decides.
        reads_as: name in the plane -> name in the method, where they differ.
        writes: columns to put.
        schema: what the columns to put must satisfy, together with those of `reads` that it has.

    Raises:
        SchemaError: the method returned other columns than it declares, or they break the schema.
        BatchError: the method returned another number of rows, or was not called with a
            KVBatchMeta.
        DataPlaneError: the columns can't be fetched, on every replica.
        ConfigError: a column is declared twice.
    """
    require_once(*(names for names in (reads, writes) if not callable(names)))

    def decorate(method: Method, /) -> Any:
        columns = Columns(method.__name__, reads, writes, reads_as or {}, schema)
        wrapper = _async_bridge(method, columns) if inspect.iscoroutinefunction(method) else _bridge(method, columns)
        declare(wrapper, columns)
        return wrapper

    return decorate


async def fetch(worker: object, method: Method, meta: KVBatchMeta) -> Fetched:
    """Get the columns of an async bridged method of this worker ahead of its call.

    Raises:
        DataPlaneError: the columns can't be fetched, on every replica.
    """
    declared = columns_of(method).of(worker, meta)
    return Fetched(meta, declared, await _get(worker, declared, meta))


def _bridge(method: Method, columns: Columns) -> Method:
    @functools.wraps(method)
    def call(self: Any, rows: Rows, *args: Any, **kwargs: Any) -> Any:
        plane, replicas = cast("BlockingPlane", self.plane), _replicas(self)
        declared, meta, data = _opened(self, rows, columns)
        if data is None and _leads(replicas):
            try:
                data = plane.get(meta, declared.reads)
            except RLError as error:
                if replicas is not None:
                    broadcast(replicas, error)
                raise
            if replicas is not None:
                broadcast(replicas, data)
        elif data is None:
            assert replicas is not None
            data = receive(replicas, declared.name)
        result = method(self, declared.rename(data), *args, **kwargs)
        if not declared.writes:
            return _without_columns(result, declared)
        made = _checked(result, meta, data, declared, columns.schema)
        if made.columns is not None and _leads(replicas):
            plane.put(meta.partition, made.keys, made.columns, tags=made.tags)
        return made.answer

    return call


def _async_bridge(
    method: Callable[..., Coroutine[Any, Any, Any]], columns: Columns
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def call(self: Any, rows: Rows, *args: Any, **kwargs: Any) -> Any:
        declared, meta, data = _opened(self, rows, columns)
        if data is None:
            data = await _get(self, declared, meta)
        result = await method(self, declared.rename(data), *args, **kwargs)
        if not declared.writes:
            return _without_columns(result, declared)
        made = _checked(result, meta, data, declared, columns.schema)
        if made.columns is not None and _leads(_replicas(self)):
            await cast("DataPlane", self.plane).put(meta.partition, made.keys, made.columns, tags=made.tags)
        return made.answer

    return call


async def _get(worker: Any, declared: Declaration, meta: KVBatchMeta) -> BatchData:
    """The columns, of which each is fetched once for all replicas."""
    plane, replicas = cast("DataPlane", worker.plane), _replicas(worker)
    if not declared.reads:
        return BatchData({}, len(meta))
    if replicas is None:
        return await plane.get(meta, declared.reads)
    if not replicas.leader:
        return await asyncio.to_thread(receive, replicas, declared.name)
    try:
        data = await plane.get(meta, declared.reads)
    except RLError as error:
        await asyncio.to_thread(broadcast, replicas, error)
        raise
    await asyncio.to_thread(broadcast, replicas, data)
    return data


def _replicas(worker: object) -> Replicas | None:
    return cast("Replicas | None", getattr(worker, "replicas", None))


def _leads(replicas: Replicas | None) -> bool:
    return replicas is None or replicas.leader


def _opened(worker: object, rows: object, columns: Columns) -> tuple[Declaration, KVBatchMeta, BatchData | None]:
    """What is declared for the rows, their names, and their columns if they were fetched ahead."""
    meta = rows.meta if isinstance(rows, Fetched) else rows
    if not isinstance(meta, KVBatchMeta):
        raise BatchError(f"{columns.name} is bridged: call it with a KVBatchMeta, not a {type(rows).__name__}.")
    declared = columns.of(worker, meta)
    return declared, meta, rows.data if isinstance(rows, Fetched) and rows.declared == declared else None


def _without_columns(result: object, declared: Declaration) -> object:
    """What a method returns that writes nothing, or nothing for these settings."""
    if not isinstance(result, Output):
        return result
    output = cast("Output[object]", result)
    if output.columns is not None and output.columns.field_names:
        raise SchemaError(
            f"{declared.name} declares that it writes []; it returned {list(output.columns.field_names)}."
        )
    return output.result


@dataclass(frozen=True, slots=True)
class _Made:
    """What to put, and what to return."""

    columns: BatchData | None
    keys: Sequence[str]
    tags: Sequence[Tag] | None
    answer: object


def _checked(
    result: object, meta: KVBatchMeta, data: BatchData, declared: Declaration, schema: BatchSchema | None
) -> _Made:
    output = cast("Output[object]", result) if isinstance(result, Output) else None
    columns, rows = (output.columns, output.rows) if output is not None else (result, None)
    if output is not None and columns is None:
        return _Made(None, (), None, output.result)
    if rows is not None:
        meta, data = meta.select_rows(rows), data.select_rows(rows)
    got = columns.field_names if isinstance(columns, BatchData) else ()
    if not isinstance(columns, BatchData) or set(got) != set(declared.writes):
        raise SchemaError(
            f"{declared.name} declares that it writes {list(declared.writes)}; it returned "
            f"{list(got) or type(columns).__name__}."
        )
    if len(columns) != len(meta):
        raise BatchError(f"{declared.name} got {counted(len(meta), 'row')} and returned {len(columns)}.")
    columns = columns.select_fields(declared.writes)
    if schema is not None:
        read = data.select_fields([name for name in data.field_names if name in schema])
        schema.check(read.union(columns), meta.keys)
    if output is not None:
        return _Made(columns, meta.keys, output.tags, output.result)
    fields = tuple(dict.fromkeys((*meta.fields, *declared.writes)))
    return _Made(columns, meta.keys, None, replace(meta, fields=fields))
