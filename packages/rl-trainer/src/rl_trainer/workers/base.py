"""The base class of workers, and the rows that they read. Imports neither Ray, torch nor vLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import msgspec

from rl_protocol import BatchData, KVBatchMeta, RowKey, WorkerError
from rl_protocol.bridge import Fetched
from rl_protocol.errors import UNREADABLE
from rl_protocol.ports import DataPlane
from rl_protocol.rl_columns import PROMPT_SCHEMA, prompt_partition
from rl_trainer.workers.columns import TRAINER_SCHEMA
from rl_trainer.workers.messages import StageCall, StageResult

Handler = Callable[..., Awaitable[Any]]


class Worker:
    """Base of all workers. `handlers` maps each callable method to the type of its message."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {}

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Decode the message, run the handler, and encode its answer.

        Raises:
            WorkerError: there is no such handler, or the message does not fit it.
        """
        kind = self.handlers.get(method)
        if kind is None:
            raise WorkerError(f"{type(self).__name__} has no handler {method!r}; it has {', '.join(self.handlers)}.")
        try:
            message = msgspec.msgpack.decode(payload, type=kind)
        except UNREADABLE as error:
            raise WorkerError(
                f"{type(self).__name__}.{method} was sent a message that is not a {kind.__name__}: {error}."
            ) from error
        answer = await self.run(method, message)
        return msgspec.msgpack.encode(StageResult() if isinstance(answer, KVBatchMeta) else answer)

    def run(self, method: str, message: msgspec.Struct) -> Awaitable[Any]:
        """Call a handler, whose answer the caller awaits.

        A stage, which `tqbridge` declares, is called with the rows of its StageCall and with the
        call. If it has no result but columns, it answers with the names of its rows.
        """
        handler: Handler = getattr(self, method)
        if isinstance(message, StageCall):
            return handler(self._rows(method, message.batch), message)
        return handler(message)

    def _rows(self, stage: str, batch: KVBatchMeta) -> KVBatchMeta | Fetched:
        """The rows that the stage is called with."""
        del stage
        return batch


def with_prompts(plane: DataPlane) -> DataPlane:
    """Wrap a plane so that `get` of trajectories also gets columns of their prompts.

    They are read once from the row of the prompt and repeated for its trajectories. All other calls
    are forwarded unchanged.
    """
    return cast("DataPlane", _WithPrompts(plane))


class _WithPrompts:
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    async def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> BatchData:
        own = [name for name in fields if name in TRAINER_SCHEMA]
        shared = [name for name in fields if name in PROMPT_SCHEMA]
        data = await self._plane.get(meta, own)
        if not shared:
            return data
        uids = [RowKey.parse(key).uid for key in meta.keys]
        place = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
        prompts = await self._plane.get(
            KVBatchMeta(partition=prompt_partition(meta.partition), keys=tuple(place)), shared
        )
        return prompts.select_rows([place[uid] for uid in uids]).union(data)
