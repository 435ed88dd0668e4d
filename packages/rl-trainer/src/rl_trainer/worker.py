"""What all workers share: calls in bytes, and columns to and from the data plane. None knows Ray, torch or vLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rl_protocol import BatchData, KVBatchMeta, RowKey, WorkerError
from rl_protocol.errors import UNREADABLE
from rl_protocol.ports import DataPlane
from rl_protocol.rl_columns import PROMPT_SCHEMA, prompt_partition
from rl_trainer.columns import TRAINER_SCHEMA
from rl_trainer.stages import Stage

Handler = Callable[[Any], Awaitable[Any]]


class Worker:
    """Base of all workers: `handlers` names what can be called, with the type of each message."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {}

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Decode the message, run the handler, encode its answer.

        Raises:
            WorkerError: no such handler, or a message that does not fit it.
        """
        kind = self.handlers.get(method)
        if kind is None:
            raise WorkerError(f"{type(self).__name__} has no handler {method!r}; it has {', '.join(self.handlers)}.")
        try:
            message = msgspec.msgpack.decode(payload, type=kind)
        except UNREADABLE as error:
            raise WorkerError(
                f"{type(self).__name__}.{method} was sent something that is not a {kind.__name__}: {error}."
            ) from error
        handler: Handler = getattr(self, method)
        return msgspec.msgpack.encode(await handler(message))


async def fetch(plane: DataPlane, batch: KVBatchMeta, fields: Sequence[str]) -> BatchData:
    """Columns of trajectories; those that belong to the prompt are read from its row once and repeated here.

    Raises:
        MissingDataError: see DataPlane.get.
    """
    own = [name for name in fields if name in TRAINER_SCHEMA]
    shared = [name for name in fields if name in PROMPT_SCHEMA]
    data = await plane.get(batch, own)
    if not shared:
        return data
    uids = [RowKey.parse(key).uid for key in batch.keys]
    place = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    prompts = await plane.get(KVBatchMeta(partition=prompt_partition(batch.partition), keys=tuple(place)), shared)
    return prompts.select_rows([place[uid] for uid in uids]).union(data)


async def read(plane: DataPlane, batch: KVBatchMeta, stage: Stage) -> BatchData:
    """The columns the stage reads, under the names it knows them by.

    Raises:
        MissingDataError: see DataPlane.get.
    """
    return stage.rename(await fetch(plane, batch, stage.reads))


async def store(plane: DataPlane, batch: KVBatchMeta, stage: Stage, data: BatchData, made: BatchData) -> None:
    """Put exactly the columns the stage declares, checked against the schema together with `data`, which it read.

    Raises:
        SchemaError: a column of another type, or that does not align with one that was read; names key, column, expected and got.
    """
    columns = made.select_fields(stage.writes)
    own = data.select_fields([name for name in data.field_names if name in TRAINER_SCHEMA])
    TRAINER_SCHEMA.check(own.union(columns), batch.keys)
    await plane.put(batch.partition, batch.keys, columns)
