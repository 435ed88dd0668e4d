"""Feed torch ranks straight from a plane (extra `[torch]`): no driver in between, no polling, a bounded number of batches ahead.

Ranks agree on the batches through the plane (see `rl_transferqueue.draws`): rank r of turn t gets the same rows whenever it asks, so a rank that
restarts with `first_turn=t` goes on where it was.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rl_protocol.errors import ConfigError, PlaneTimeout
from rl_protocol.meta import KVBatchMeta, Scalar
from rl_protocol.torch import to_tensordict
from rl_transferqueue.blocking import portal
from rl_transferqueue.client import Client, connect
from rl_transferqueue.descriptor import PlaneDescriptor
from rl_transferqueue.draws import draw
from rl_transferqueue.memory import copying
from rl_transferqueue.samplers import Sampler

Batch: TypeAlias = tuple[TensorDict, KVBatchMeta]
"""Columns of one rank's share of a turn, and the names of its rows."""


class StreamingDataset(IterableDataset[Batch]):
    """The batches of one rank, as they become ready.

    Lifecycle: each `iter` opens a client of its own and closes it at its end. Up to `ahead` batches are drawn before they are asked for; what is
    drawn counts as consumed. With several workers of a DataLoader, worker w of W takes the turns first_turn + w, + W, ..., which keeps the order.

    Args:
        descriptor: the plane.
        partition: where the rows are.
        task: whoever must not be handed a row twice.
        fields: columns to read; rows are ready once they have them.
        sampler: who gets what, the same on all ranks.
        count: units per turn, for all ranks together; see `Sampler.sample`.
        rank: which share of a turn is this one's.
        where: tags the rows must have.
        turns: how many turns there are; None: no end.
        first_turn: the turn to begin with.
        ahead: batches to draw ahead, at least 1.
        timeout_s: seconds to wait for a batch.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(
        self,
        descriptor: PlaneDescriptor,
        *,
        partition: str,
        task: str,
        fields: Sequence[str],
        sampler: Sampler,
        count: int,
        rank: int = 0,
        where: Mapping[str, Scalar] | None = None,
        turns: int | None = None,
        first_turn: int = 0,
        ahead: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        if min(count, ahead) < 1 or min(rank, first_turn, turns or 0) < 0 or timeout_s < 0:
            raise ConfigError(
                f"count and ahead must be at least 1, rank, first_turn, turns and timeout_s at least 0; got {count}, {ahead}, {rank}, {first_turn}, "
                f"{turns}, {timeout_s}."
            )
        self.descriptor = descriptor
        self.partition = partition
        self.task = task
        self.fields = tuple(fields)
        self.sampler = sampler
        self.count = count
        self.rank = rank
        self.where = where
        self.turns = turns
        self.first_turn = first_turn
        self.ahead = ahead
        self.timeout_s = timeout_s

    def __iter__(self) -> Iterator[Batch]:
        """Batch after batch.

        Raises:
            PlaneTimeout: none was ready within `timeout_s`.
            PlaneLostError: the plane is gone.
        """
        on = portal()
        stream = on.run(_Stream.open(self, self._turns()))
        try:
            while True:
                batch = on.run(stream.next())
                if batch is None:
                    return
                yield batch
                del batch  # its memory is the caller's to hold, not ours while we wait for the next
        finally:
            on.run(stream.close())

    def _turns(self) -> Iterator[int]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        turns = itertools.count(self.first_turn) if self.turns is None else range(self.first_turn, self.turns)
        return itertools.islice(turns, mine, None, workers)


class StreamingDataLoader(DataLoader[Batch]):
    """A DataLoader that hands on the batches of a StreamingDataset as they are; takes the arguments of DataLoader that say where it runs."""

    def __init__(self, dataset: StreamingDataset, num_workers: int = 0, **where: Any) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=_as_it_is, num_workers=num_workers, **where)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Stream:
    """Draws ahead on the portal's loop, for one iterator."""

    def __init__(self, dataset: StreamingDataset, turns: Iterator[int], plane: Client) -> None:
        self._of = dataset
        self._plane = plane
        self._ready: asyncio.Queue[Batch | None] = asyncio.Queue(dataset.ahead)
        # The task ends in an exception whose frames hold batches and this object: `close` parts them, or their memory waits for the gc.
        self._drawing: asyncio.Future[None] = asyncio.create_task(self._draw(turns))

    @classmethod
    async def open(cls, dataset: StreamingDataset, turns: Iterator[int]) -> _Stream:
        """Connect and begin to draw."""
        return cls(dataset, turns, await connect(dataset.descriptor))

    async def next(self) -> Batch | None:
        """The next batch; None: there are no more."""
        getting = asyncio.create_task(self._ready.get())
        done, _ = await asyncio.wait(
            (getting, self._drawing), timeout=self._of.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if getting in done:
            return getting.result()
        getting.cancel()
        if not self._ready.empty():
            return self._ready.get_nowait()
        if self._drawing in done:
            self._drawing.result()
        raise PlaneTimeout(
            f"Rank {self._of.rank} of task {self._of.task!r} got no batch of partition {self._of.partition!r} within {self._of.timeout_s:g} s; "
            "raise timeout_s or look at who should write the rows."
        )

    async def close(self) -> None:
        """Stop drawing and disconnect."""
        drawing, self._drawing = self._drawing, asyncio.get_running_loop().create_future()
        drawing.cancel()
        await asyncio.wait((drawing,))
        if not drawing.cancelled():
            drawing.exception()  # it was raised by `next`, or nobody cares any more
        while not self._ready.empty():
            self._ready.get_nowait()
        await self._plane.close()

    async def _draw(self, turns: Iterator[int]) -> None:
        for turn in turns:
            await self._ready.put(await self._batch(turn))
        await self._ready.put(None)

    async def _batch(self, turn: int) -> Batch:
        of = self._of
        while True:
            try:
                shares = await draw(
                    self._plane,
                    of.sampler,
                    of.partition,
                    task=of.task,
                    count=of.count,
                    fields=of.fields,
                    where=of.where,
                    turn=str(turn),
                    timeout_s=of.timeout_s,
                )
            except PlaneTimeout:  # the one who waits for a batch keeps the deadline, and closes this
                continue
            data = await self._plane.get(shares[of.rank])
            return await copying(data.nbytes, partial(to_tensordict, data)), shares[of.rank]
