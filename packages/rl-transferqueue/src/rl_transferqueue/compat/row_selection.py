"""Choose rows for `get_meta` with a TransferQueue 0.1.11 sampler, and claim them atomically."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_protocol.batch.kv_batch_meta import KVBatchMeta as Rows
from rl_protocol.batch.kv_batch_meta import Tag
from rl_protocol.errors import BatchError, ConflictError, MissingDataError, PlaneTimeout
from rl_transferqueue.client.client import Client
from rl_transferqueue.compat.field_table import indexes_of
from rl_transferqueue.compat.msgpack_values import unpack_tag
from rl_transferqueue.compat.sampler import BaseSampler, SequentialSampler
from rl_transferqueue.compat.session import Session
from rl_transferqueue.consume.sampled_batches import DrawSettings, draw
from rl_transferqueue.consume.samplers import Shares


@dataclass(frozen=True)
class _TagsOf:
    """PartitionView of the rows that a sampler chooses from."""

    tags: Mapping[int, Tag]

    def get_custom_meta(self, global_indices: list[int]) -> dict[int, dict[str, Any]]:

        return {index: unpack_tag(self.tags[index]) for index in global_indices}


@dataclass(frozen=True)
class _Asked:
    """Adapts a 0.1.11 sampler, for all ranks that it decides together, to `samplers.Sampler`."""

    sampler: BaseSampler
    batch_size: int
    config: Mapping[str, Any]
    ranks: Sequence[int]

    def sample(self, ready: Rows, count: int) -> Shares:
        del count
        # The plane keeps decisions; the sampler decides again about rows that were not taken.
        self.sampler.clear_cache(self.config["partition_id"])
        return tuple(tuple(_places(ready, self.ask(ready, rank)[0])) for rank in self.ranks)

    def ask(self, ready: Rows, rank: int | None = None) -> tuple[list[int], list[int]]:
        """Global indexes to hand out, and those to mark consumed."""
        config = dict(self.config) | ({} if rank is None else {"dp_rank": rank})
        view = _TagsOf(dict(zip(indexes_of(ready), ready.tags, strict=True)))
        return self.sampler(indexes_of(ready), self.batch_size, partition=view, **config)


def _places(ready: Rows, indexes: Sequence[int]) -> list[int]:
    place = {index: row for row, index in enumerate(indexes_of(ready))}
    return [place[index] for index in indexes]


async def fetch(
    session: Session,
    fields: Sequence[str],
    count: int,
    partition: str,
    task: str,
    config: Mapping[str, Any],
) -> Rows:
    """Rows that have all `fields`, marked consumed by `task`.

    The same `dp_rank` and `batch_index` in `config` give the same rows in every process.

    Raises:
        PlaneTimeout: too few rows were ready before the deadline.
    """
    plane, settings = session.plane, session.settings
    sampler, rank = settings.sampler, config.get("dp_rank")
    seconds = 0.0 if settings.polling_mode else settings.fetch_timeout_s
    if type(sampler) is SequentialSampler:
        return await plane.wait_ready(partition, count=count, fields=fields, task=task, timeout_s=seconds)
    told = {"task_name": task, "partition_id": partition} | dict(config)
    if rank is None or "batch_index" not in config:
        return await _sample_alone(plane, _Asked(sampler, count, told, ()), fields, partition, task, seconds)
    ranks = sampler.settled_ranks(rank)
    if rank not in ranks:
        raise BatchError(f"dp_rank {rank} is not one of the ranks {list(ranks)} of the {type(sampler).__name__}.")
    turn = f"{ranks[0]}-{ranks[-1]}/{config['batch_index']}"
    asked = _Asked(sampler, count, told, ranks)
    wanted = DrawSettings(partition=partition, task=task, count=count, fields=tuple(fields), timeout_s=seconds)
    shares = await draw(plane, asked, wanted, turn=turn)
    return await plane.list_rows(partition, keys=shares[list(ranks).index(rank)].keys)


async def _sample_alone(
    plane: Client, asked: _Asked, fields: Sequence[str], partition: str, task: str, seconds: float
) -> Rows:
    """Ask a sampler after each change of the rows, until it finds a batch."""
    loop = asyncio.get_running_loop()
    deadline, version = loop.time() + seconds, 0
    while True:
        ready = await plane.list_rows(partition, fields=fields, task=task)
        sampled, consumed = asked.ask(ready) if len(ready) >= asked.batch_size else ([], [])
        if sampled:
            try:
                if consumed:
                    await plane.claim(partition, [ready.keys[row] for row in _places(ready, consumed)], task=task)
            except (ConflictError, MissingDataError):  # another process took some: list again
                asked.sampler.clear_cache(partition)
                continue
            return ready.select_rows(_places(ready, sampled))
        left = max(0.0, deadline - loop.time())
        changes = await plane.watch(partition, since=version, timeout_s=left)
        if changes.version == version and version and left <= 0.0:
            raise PlaneTimeout(
                f"Task {task!r} wants {asked.batch_size} rows with {list(fields)} of partition {partition!r}; {len(ready)} "
                f"are ready, and the sampler found no batch among them within {seconds:g} s."
            )
        version = changes.version
