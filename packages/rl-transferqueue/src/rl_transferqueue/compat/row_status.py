"""Consumption and production status of rows, as TransferQueue 0.1.11 reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_protocol.batch.kv_batch_meta import KVBatchMeta as Rows
from rl_transferqueue.compat.field_table import indexes_of
from rl_transferqueue.compat.session import Session
from rl_transferqueue.consume.sampled_batches import draws_of


async def get_consumption_status(
    session: Session, task_name: str, partition_id: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Global indexes [N] and int8 [N], 1 where the task has consumed the row.

    (None, None) if the partition has no rows.
    """
    rows = await session.plane.list_rows(partition_id)
    flags = await session.plane.consumption_status(partition_id, task=task_name)
    return _status(rows, flags.keys, flags.flags) if rows else (None, None)


async def get_production_status(
    session: Session, data_fields: list[str], partition_id: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Global indexes [N] and int8 [N, F], 1 where the row has the field.

    (None, None) if there is a field that no row has.
    """
    rows = await session.plane.list_rows(partition_id)
    if not rows or not data_fields:
        return None, None
    flags = await session.plane.production_status(partition_id, fields=data_fields)
    return _status(rows, flags.keys, flags.flags) if flags.flags.any(axis=0).all() else (None, None)


async def check_consumption_status(session: Session, task_name: str, partition_id: str) -> bool:
    """Whether the task has consumed every row."""
    _, status = await get_consumption_status(session, task_name, partition_id)
    return status is not None and bool(status.numel()) and bool((status == 1).all())


async def check_production_status(session: Session, data_fields: list[str], partition_id: str) -> bool:
    """Whether every row has all fields."""
    _, status = await get_production_status(session, data_fields, partition_id)
    return status is not None and bool((status == 1).all())


async def reset_consumption(session: Session, partition_id: str, task_name: str | None = None) -> bool:
    """Make the rows available to tasks again; False if the partition has no rows."""
    if not await session.plane.list_rows(partition_id):
        return False
    await session.plane.reset_consumption(partition_id, task=task_name)
    await session.plane.clear(draws_of(partition_id))
    session.settings.sampler.clear_cache(partition_id)
    return True


def _status(rows: Rows, keys: Sequence[str], flags: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Global indexes and flags of the rows that are in both answers."""
    index_of = dict(zip(rows.keys, indexes_of(rows), strict=True))
    known = [place for place, key in enumerate(keys) if key in index_of]
    indexes = torch.tensor([index_of[keys[place]] for place in known], dtype=torch.long)
    return indexes, torch.from_numpy(flags[known].astype(np.int8))
