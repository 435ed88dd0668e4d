"""StreamingDataset and StreamingDataLoader of 0.1.11: feed torch ranks from a partition."""

from rl_transferqueue.compat.dataloader.streaming_dataloader import StreamingDataLoader
from rl_transferqueue.compat.dataloader.streaming_dataset import StreamingDataset

__all__ = ["StreamingDataLoader", "StreamingDataset"]
