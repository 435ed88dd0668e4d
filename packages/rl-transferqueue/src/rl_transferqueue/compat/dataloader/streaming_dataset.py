"""StreamingDataset of 0.1.11, which fetches batches of one data-parallel rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch.utils.data import IterableDataset

from rl_protocol.errors import BatchError
from rl_transferqueue.compat.client import TransferQueueClient
from rl_transferqueue.compat.errors import NotReadyError
from rl_transferqueue.compat.lifecycle import settings_of
from rl_transferqueue.compat.metadata.batch_meta import BatchMeta

Fetched: TypeAlias = tuple[TensorDict, BatchMeta]


class StreamingDataset(IterableDataset[Fetched]):
    """Micro-batches of one data-parallel rank, as rows become ready.

    Batches are kept until `step`, and repeated after `reset`.

    Args:
        config: what `init` returned.
        batch_size: rows to fetch at once.
        micro_batch_size: rows to yield at once.
        data_fields: fields to read.
        partition_id: the rows' partition.
        task_name: the consumer; a task gets each row once.
        dp_rank: processes with the same rank get the same rows; use the RankAwareSampler.
        should_check_consumption_status: end when the task has consumed the whole partition;
            otherwise never end.
        fetch_batch_fn: replaces `default_fetch_batch_fn`; returns (None, meta) if no rows are
            ready.
        process_batch_fn: replaces `chunk_batch_fn`.
        timeout_s: longest time without data; 0.1.11 has no limit.

    Raises:
        BatchError: a number is out of range, or there are no fields.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., tuple[TensorDict | None, BatchMeta]] | None = None,
        process_batch_fn: Callable[..., Iterable[Fetched]] | None = None,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        if micro_batch_size < 1 or dp_rank < 0 or not data_fields:
            raise BatchError(
                f"micro_batch_size must be at least 1, dp_rank at least 0, and data_fields not empty; got "
                f"{micro_batch_size}, {dp_rank}, {data_fields}."
            )
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = data_fields
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.timeout_s = timeout_s
        self.sampling_config: dict[str, Any] = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Fetched] = []
        self.batch_index = 0

    def __iter__(self) -> Iterator[Fetched]:
        """Yield micro-batches, read by a separate client.

        Raises:
            NotReadyError: no data for `timeout_s` seconds.
        """
        settings = settings_of(self.config)
        settings.polling_mode = False
        zmq_info = self.config["controller"]["zmq_info"]
        client = TransferQueueClient(f"StreamingDataset_{os.getpid()}", zmq_info, settings=settings)
        try:
            yield from self._micro_batches(client)
        finally:
            client.close()

    def _micro_batches(self, client: TransferQueueClient) -> Iterator[Fetched]:
        deadline = time.monotonic() + self.timeout_s
        while self.batch_index < len(self.buffer) or not self._finished(client):
            if self.batch_index < len(self.buffer):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
                deadline = time.monotonic() + self.timeout_s
                continue
            data, meta = self._fetch(client)
            if data is not None:
                self.buffer.append((data, meta))
            elif time.monotonic() > deadline:
                raise NotReadyError(
                    f"Task {self.task_name!r} did not get {self.batch_size} rows of partition {self.partition_id!r} "
                    f"within {self.timeout_s:g} s."
                )

    def reset(self) -> None:
        """Begin again with the batches that were fetched."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Go to another partition; batches of the current one are released."""
        self.buffer = []
        self.batch_index = 0
        self.partition_id = partition_id

    def _finished(self, client: TransferQueueClient) -> bool:
        return self.should_check_consumption_status and client.check_consumption_status(
            self.task_name, self.partition_id
        )

    def _fetch(self, client: TransferQueueClient) -> tuple[TensorDict | None, BatchMeta]:
        try:
            return self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index,
            )
        except NotReadyError:
            return None, BatchMeta.empty()


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """The next batch and its metadata, or None and empty metadata; waits as `get_meta` does."""
    config = sampling_config | {"batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(data_fields, batch_size, partition_id, task_name=task_name, sampling_config=config)
    return (tq_client.get_data(meta), meta) if meta.size else (None, meta)


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Fetched]:
    """Consecutive parts of at most `micro_batch_size` rows.

    Raises:
        BatchError: fewer rows than `micro_batch_size`, or a size below 1.
    """
    rows = int(td.batch_size[0])
    if not 1 <= micro_batch_size <= rows:
        raise BatchError(f"micro_batch_size must be in 1..{rows}; got {micro_batch_size}.")
    spans = [(start, min(start + micro_batch_size, rows)) for start in range(0, rows, micro_batch_size)]
    nested = {name: value.unbind() for name, value in td.items() if isinstance(value, torch.Tensor) and value.is_nested}
    others = td.exclude(*nested)
    return [(_part(others[start:stop], td, nested, start, stop), batch_meta[start:stop]) for start, stop in spans]


def _part(
    part: Any, whole: TensorDict, nested: Mapping[str, Sequence[torch.Tensor]], start: int, stop: int
) -> TensorDict:
    """Add the rows of nested fields, which can't be sliced, to the slice `part`."""
    for name, rows in nested.items():
        part[name] = torch.nested.as_nested_tensor(list(rows[start:stop]), layout=whole[name].layout)
    return part
