"""StreamingDataLoader of 0.1.11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from rl_transferqueue.compat.dataloader.streaming_dataset import Fetched, StreamingDataset


class StreamingDataLoader(DataLoader[Fetched]):
    """A DataLoader over a StreamingDataset; takes the arguments of DataLoader."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _identity,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self._streaming = dataset

    def reset(self) -> None:
        """Begin again with the batches that were fetched."""
        self._streaming.reset()

    def step(self, partition_id: str) -> None:
        """Go to another partition; batches of the current one are released."""
        self._streaming.step(partition_id)

    def get_buffer(self) -> list[Fetched]:
        """The batches fetched since the last `step`."""
        return self._streaming.buffer


def _identity(batch: Any) -> Any:
    return batch
