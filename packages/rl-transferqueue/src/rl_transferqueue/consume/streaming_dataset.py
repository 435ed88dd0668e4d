"""StreamingDataset and StreamingDataLoader: feed torch ranks from a plane (extra `[torch]`).

No driver is involved. Ranks agree on the batches through the plane (see `sampled_batches`): a rank
gets the same rows for a turn each time it asks, so a rank that restarts with `first_turn=t`
continues where it stopped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

try:
    from tensordict import TensorDict
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed; pip install 'rl-transferqueue[torch]'", name=error.name
    ) from error

from rl_protocol.batch.kv_batch_meta import KVBatchMeta
from rl_protocol.errors import ConfigError, PlaneTimeout
from rl_protocol.torch import to_tensordict
from rl_transferqueue.client.blocking_client import portal
from rl_transferqueue.client.client import Client, connect
from rl_transferqueue.client.memory_interface import copying
from rl_transferqueue.consume.sampled_batches import DrawSettings, draw
from rl_transferqueue.consume.samplers import Sampler
from rl_transferqueue.wire.descriptor import PlaneDescriptor

Batch: TypeAlias = tuple[TensorDict, KVBatchMeta]
"""Columns of one rank's rows of a turn, and the rows."""


class StreamingDataset(IterableDataset[Batch]):
    """The batches of one rank, as rows become ready.

    Lifecycle: each iterator opens a client and closes it at its end. Up to `ahead` batches are
    drawn ahead; drawn rows count as consumed. Worker w of a DataLoader with W workers takes the
    turns first_turn + w, first_turn + w + W, ..., so turns come in order. Which rows a turn has
    depends on which worker draws first: a later turn may have older rows.

    Args:
        descriptor: the plane.
        sampler: chooses the rows of each rank; the same on all ranks.
        draws: the rows to draw; `fields` are the columns to read, `timeout_s` limits the wait for
            a batch.
        rank: this rank.
        turns: the turn to end before; None: no end.
        first_turn: the turn to begin with.
        ahead: batches to draw ahead, at least 1.

    Raises:
        ConfigError: a number is out of range, or the sampler has no share for the rank.
    """

    def __init__(
        self,
        descriptor: PlaneDescriptor,
        sampler: Sampler,
        draws: DrawSettings,
        *,
        rank: int = 0,
        turns: int | None = None,
        first_turn: int = 0,
        ahead: int = 1,
    ) -> None:
        super().__init__()
        if min(draws.count, ahead) < 1 or min(rank, first_turn, turns or 0) < 0 or draws.timeout_s < 0:
            raise ConfigError(
                f"count and ahead must be at least 1, and rank, first_turn, turns and timeout_s at least 0; got "
                f"{draws.count}, {ahead}, {rank}, {first_turn}, {turns}, {draws.timeout_s}."
            )
        ranks = getattr(sampler, "ranks", None)
        if isinstance(ranks, int):
            _check_rank(rank, ranks, sampler)
        self.descriptor = descriptor
        self.sampler = sampler
        self.draws = draws
        self.rank = rank
        self.turns = turns
        self.first_turn = first_turn
        self.ahead = ahead

    def __iter__(self) -> Iterator[Batch]:
        """Yield one batch per turn.

        Raises:
            PlaneTimeout: no batch was ready in time.
            PlaneLostError: the plane has ended.
            ConfigError: the sampler made no share for the rank.
        """
        loop_thread = portal()
        stream = loop_thread.run(_Stream.open(self, self._turns()))
        try:
            while True:
                batch = loop_thread.run(stream.next())
                if batch is None:
                    return
                yield batch
                del batch  # so that only the caller holds its memory while this waits for the next
        finally:
            loop_thread.run(stream.close())

    def _turns(self) -> Iterator[int]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        turns = itertools.count(self.first_turn) if self.turns is None else range(self.first_turn, self.turns)
        return itertools.islice(turns, number, None, workers)


class StreamingDataLoader(DataLoader[Batch]):
    """A DataLoader over a StreamingDataset that leaves its batches unchanged.

    Args:
        dataset: the batches.
        num_workers: see DataLoader.
        options: other arguments of DataLoader, except `batch_size` and `collate_fn`.
    """

    def __init__(self, dataset: StreamingDataset, num_workers: int = 0, **options: Any) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=_identity, num_workers=num_workers, **options)


def _check_rank(rank: int, shares: int, sampler: Sampler) -> None:
    if rank >= shares:
        raise ConfigError(
            f"rank must be below the number of shares that the sampler makes; got rank {rank}, and "
            f"{type(sampler).__name__} makes {shares}. Set rank, or the sampler's number of ranks."
        )


def _identity(batch: Any) -> Any:
    return batch


class _Stream:
    """Draws ahead for one iterator, on the portal's loop."""

    def __init__(self, dataset: StreamingDataset, turns: Iterator[int], plane: Client) -> None:
        self._dataset = dataset
        self._plane = plane
        self._lack = ""
        """What the draw under way waits for."""
        self._ready: asyncio.Queue[Batch | None] = asyncio.Queue(dataset.ahead)
        # If the task raises, the frames of its exception refer to batches and to this object.
        # `close` breaks the cycle; otherwise their memory waits for the garbage collector.
        self._drawing: asyncio.Future[None] = asyncio.create_task(self._draw(turns))

    @classmethod
    async def open(cls, dataset: StreamingDataset, turns: Iterator[int]) -> _Stream:
        """Connect and begin to draw."""
        return cls(dataset, turns, await connect(dataset.descriptor))

    async def next(self) -> Batch | None:
        """The next batch; None after the last one."""
        draws = self._dataset.draws
        getting = asyncio.create_task(self._ready.get())
        done, _ = await asyncio.wait(
            (getting, self._drawing), timeout=draws.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if getting in done:
            return getting.result()
        getting.cancel()
        if not self._ready.empty():
            return self._ready.get_nowait()
        if self._drawing in done:
            self._drawing.result()
        why = f": {self._lack}. Raise" if self._lack else "; raise"
        raise PlaneTimeout(
            f"Rank {self._dataset.rank} of task {draws.task!r} got no batch of partition {draws.partition!r} within "
            f"{draws.timeout_s:g} s{why} timeout_s, or check the processes that write the rows."
        )

    async def close(self) -> None:
        """Stop drawing and disconnect."""
        drawing, self._drawing = self._drawing, asyncio.get_running_loop().create_future()
        drawing.cancel()
        await asyncio.wait((drawing,))
        if not drawing.cancelled():
            drawing.exception()  # mark it as retrieved: `next` raised it, or the iterator has ended
        while not self._ready.empty():
            self._ready.get_nowait()
        await self._plane.close()

    async def _draw(self, turns: Iterator[int]) -> None:
        for turn in turns:
            await self._ready.put(await self._batch(turn))
        await self._ready.put(None)

    async def _batch(self, turn: int) -> Batch:
        while True:
            try:
                shares = await draw(
                    self._plane, self._dataset.sampler, self._dataset.draws, turn=str(turn), on_wait=self._waits
                )
            except PlaneTimeout:  # `next` has the deadline for a batch, and closes this stream
                continue
            self._lack = ""
            _check_rank(self._dataset.rank, len(shares), self._dataset.sampler)
            share = shares[self._dataset.rank]
            data = await self._plane.get(share)
            return await copying(data.nbytes, partial(to_tensordict, data)), share

    def _waits(self, lack: str) -> None:
        self._lack = lack
