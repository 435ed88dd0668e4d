"""Feed torch ranks from a partition, as 0.1.11 does."""

from rl_transferqueue.compat.dataloader.streaming_dataloader import StreamingDataLoader
from rl_transferqueue.compat.dataloader.streaming_dataset import StreamingDataset

__all__ = ["StreamingDataLoader", "StreamingDataset"]
