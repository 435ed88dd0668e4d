"""How `get_meta` finds rows for a task: with a sampler of 0.1.11, over the plane's atomic claims."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_protocol.errors import BatchError, ConflictError, MissingDataError, PlaneTimeout
from rl_protocol.meta import KVBatchMeta as Rows
from rl_protocol.meta import Tag
from rl_transferqueue.client import Client
from rl_transferqueue.compat.objects import unpack_tag
from rl_transferqueue.compat.sampler import BaseSampler, SequentialSampler
from rl_transferqueue.compat.table import indexes_of
from rl_transferqueue.draws import draw
from rl_transferqueue.samplers import Shares


@dataclass(kw_only=True)
class Settings:
    """What `init` was told about fetching; the same in every process of a plane."""

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    polling_mode: bool = False
    """get_meta returns an empty BatchMeta at once instead of waiting."""
    fetch_timeout_s: float = 5.0
    """How long get_meta waits otherwise."""


@dataclass(frozen=True)
class _TagsOf:
    """What a sampler may ask about the rows it chooses from."""

    tags: Mapping[int, Tag]

    def get_custom_meta(self, global_indices: list[int]) -> dict[int, dict[str, Any]]:
        """See PartitionView."""
        return {index: unpack_tag(self.tags[index]) for index in global_indices}


@dataclass(frozen=True)
class _Asked:
    """A 0.1.11 sampler asked for all ranks whose rows it decides at once, as a native sampler."""

    sampler: BaseSampler
    batch_size: int
    config: Mapping[str, Any]
    ranks: Sequence[int]

    def sample(self, ready: Rows, count: int) -> Shares:
        """See rl_transferqueue.samplers.Sampler."""
        del count
        self.sampler.clear_cache(
            self.config["partition_id"]
        )  # what was decided is in the plane; what was not taken must be decided anew
        return tuple(tuple(_places(ready, self.ask(ready, rank)[0])) for rank in self.ranks)

    def ask(self, ready: Rows, rank: int | None = None) -> tuple[list[int], list[int]]:
        """Row numbers to hand out and to consume."""
        config = dict(self.config) | ({} if rank is None else {"dp_rank": rank})
        view = _TagsOf(dict(zip(indexes_of(ready), ready.tags, strict=True)))
        return self.sampler(indexes_of(ready), self.batch_size, partition=view, **config)


def _places(ready: Rows, indexes: Sequence[int]) -> list[int]:
    place = {index: row for row, index in enumerate(indexes_of(ready))}
    return [place[index] for index in indexes]


async def fetch(
    plane: Client,
    settings: Settings,
    fields: Sequence[str],
    count: int,
    partition: str,
    task: str,
    config: Mapping[str, Any],
) -> Rows:
    """Rows that have all `fields`, marked consumed by `task`. The same `dp_rank` and `batch_index` in `config` mean the same rows, in any process.

    Raises:
        PlaneTimeout: too few until the deadline.
    """
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
    shares = await draw(plane, asked, partition, task=task, count=count, fields=fields, turn=turn, timeout_s=seconds)
    mine = shares[list(ranks).index(rank)]
    return await plane.list_rows(partition, keys=mine.keys)


async def _sample_alone(
    plane: Client, asked: _Asked, fields: Sequence[str], partition: str, task: str, seconds: float
) -> Rows:
    """A sampler that says itself what is consumed, asked again whenever rows have changed."""
    loop = asyncio.get_running_loop()
    deadline, version = loop.time() + seconds, 0
    while True:
        ready = await plane.list_rows(partition, fields=fields, task=task)
        sampled, consumed = asked.ask(ready) if len(ready) >= asked.batch_size else ([], [])
        if sampled:
            try:
                if consumed:
                    await plane.claim(partition, [ready.keys[row] for row in _places(ready, consumed)], task=task)
            except (ConflictError, MissingDataError):  # somebody was faster: look again
                asked.sampler.clear_cache(partition)
                continue
            return ready.select_rows(_places(ready, sampled))
        left = max(0.0, deadline - loop.time())
        changes = await plane.watch(partition, since=version, timeout_s=left)
        if changes.version == version and version and left <= 0.0:
            raise PlaneTimeout(
                f"Task {task!r} wants {asked.batch_size} rows with {list(fields)} of partition {partition!r}; {len(ready)} are ready, and the "
                f"sampler found no batch among them within {seconds:g} s."
            )
        version = changes.version
