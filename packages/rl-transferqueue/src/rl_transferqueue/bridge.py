"""tqbridge: a method of a worker says which columns it reads and writes; names go in, names come out, and the columns move by the data plane.

class Actor:
    def __init__(self, plane: DataPlane) -> None:
        self.plane = plane

    @tqbridge(reads=("prompts", "responses"), writes=("old_log_probs",))
    async def old_log_prob(self, batch: BatchData, *, temperature: float) -> BatchData: ...

check_flow([declaration(Actor.old_log_prob), ...], given=("prompts", "responses"))  # before anything starts
meta = await actor.old_log_prob(meta, temperature=1.0)                              # KVBatchMeta in and out
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

from rl_protocol import wire
from rl_protocol.batch import BatchData
from rl_protocol.errors import BatchError, ConfigError, RLError, SchemaError, WorkerError
from rl_protocol.flow import check_flow
from rl_protocol.meta import KVBatchMeta
from rl_protocol.ports import DataPlane
from rl_transferqueue.blocking import BlockingPlane

__all__ = ["Declaration", "Replicas", "check_flow", "declaration", "tqbridge"]

Method: TypeAlias = Callable[..., Any]

_DECLARED = "__tqbridge__"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a bridged method reads and writes; a step for `check_flow`."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Replicas(Protocol):
    """The ranks that work on the same rows (tensor, pipeline and context parallel): one of them, the leader, deals with the plane."""

    @property
    def leader(self) -> bool:
        """Whether this rank is the one."""
        ...

    def share(self, message: bytes | None) -> bytes:
        """Called by all ranks at the same step: the leader gives bytes, everybody gets them. Must have a deadline of its own."""
        ...


def declaration(method: Method) -> Declaration:
    """What a bridged method declares.

    Raises:
        ConfigError: the method is not bridged.
    """
    found = getattr(method, _DECLARED, None)
    if not isinstance(found, Declaration):
        raise ConfigError(
            f"{getattr(method, '__qualname__', method)!r} declares no columns; decorate it with tqbridge."
        )
    return found


def tqbridge(*, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> Callable[[Method], Method]:
    """Bridge a method, sync or async, whose first argument is a BatchData.

    The bridged method is called with a KVBatchMeta instead. It fetches the columns `reads` from `self.plane` (an async method: a DataPlane; a sync
    one: a BlockingPlane) and, if the method writes, puts what it returns: exactly the columns `writes`, one row per row. It then returns
    the KVBatchMeta, tags and extra_info kept, that knows of the new columns. A method that writes nothing returns what it likes. Where `self`
    has `replicas`, only their leader fetches and puts; the others are told the columns by it, or why there are none.

    Raises:
        SchemaError: the method returned other columns than it declares.
        BatchError: the method returned another number of rows, or was not called with a KVBatchMeta.
        WorkerError: on the other replicas, when the leader could not fetch.
        ConfigError: a column declared twice.
    """
    for names in (reads, writes):
        if len(set(names)) != len(names):
            raise ConfigError(f"tqbridge: columns must be declared once; got {list(names)}.")

    def decorate(method: Method) -> Method:
        declared = Declaration(method.__name__, tuple(reads), tuple(writes))
        wrapper = _async_bridge(method, declared) if inspect.iscoroutinefunction(method) else _bridge(method, declared)
        setattr(wrapper, _DECLARED, declared)
        return wrapper

    return decorate


def _bridge(method: Method, declared: Declaration) -> Method:
    @functools.wraps(method)
    def call(self: Any, meta: KVBatchMeta, *args: Any, **kwargs: Any) -> Any:
        plane, replicas = cast("BlockingPlane", self.plane), _replicas(self)
        _check_meta(meta, declared)
        if _leads(replicas):
            try:
                batch = plane.get(meta, declared.reads)
            except RLError as error:
                _tell(replicas, error)
                raise
            _tell(replicas, batch)
        else:
            batch = _hear(replicas, declared)
        result = method(self, batch, *args, **kwargs)
        if not declared.writes:
            return result
        columns = _check_result(result, meta, declared)
        if _leads(replicas):
            plane.put(meta.partition, meta.keys, columns)
        return _grown(meta, declared)

    return call


def _async_bridge(
    method: Callable[..., Coroutine[Any, Any, Any]], declared: Declaration
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def call(self: Any, meta: KVBatchMeta, *args: Any, **kwargs: Any) -> Any:
        plane, replicas = cast("DataPlane", self.plane), _replicas(self)
        _check_meta(meta, declared)
        if _leads(replicas):
            try:
                batch = await plane.get(meta, declared.reads)
            except RLError as error:
                await asyncio.to_thread(_tell, replicas, error)
                raise
            await asyncio.to_thread(_tell, replicas, batch)
        else:
            batch = await asyncio.to_thread(_hear, replicas, declared)
        result = await method(self, batch, *args, **kwargs)
        if not declared.writes:
            return result
        columns = _check_result(result, meta, declared)
        if _leads(replicas):
            await plane.put(meta.partition, meta.keys, columns)
        return _grown(meta, declared)

    return call


def _replicas(worker: Any) -> Replicas | None:
    return cast("Replicas | None", getattr(worker, "replicas", None))


def _leads(replicas: Replicas | None) -> bool:
    return replicas is None or replicas.leader


def _tell(replicas: Replicas | None, outcome: BatchData | RLError) -> None:
    """What the leader fetched, or why it could not."""
    if replicas is not None:
        parts = wire.encode(outcome) if isinstance(outcome, BatchData) else [str(outcome).encode()]
        replicas.share(b"".join((b"\1" if isinstance(outcome, BatchData) else b"\0", *map(bytes, parts))))


def _hear(replicas: Replicas | None, declared: Declaration) -> BatchData:
    assert replicas is not None
    message = replicas.share(None)
    if message[:1] == b"\0":
        raise WorkerError(
            f"{declared.name}: the leader of this rank's replicas could not fetch: {message[1:].decode()}"
        )
    return wire.decode(message[1:])


def _check_meta(meta: object, declared: Declaration) -> None:
    if not isinstance(meta, KVBatchMeta):
        raise BatchError(f"{declared.name} is bridged: call it with a KVBatchMeta, not a {type(meta).__name__}.")


def _check_result(result: object, meta: KVBatchMeta, declared: Declaration) -> BatchData:
    got = result.field_names if isinstance(result, BatchData) else ()
    if not isinstance(result, BatchData) or set(got) != set(declared.writes):
        raise SchemaError(
            f"{declared.name} declares that it writes {list(declared.writes)}; it returned {list(got) or type(result).__name__}."
        )
    if len(result) != len(meta):
        raise BatchError(f"{declared.name} was given {len(meta)} rows and returned {len(result)}.")
    return result


def _grown(meta: KVBatchMeta, declared: Declaration) -> KVBatchMeta:
    return replace(meta, fields=tuple(dict.fromkeys((*meta.fields, *declared.writes))))
