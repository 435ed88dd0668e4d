"""The API of TransferQueue 0.1.11: `import rl_transferqueue.compat as tq`. Needs the extra `[compat]` (torch, tensordict); no Ray.

Names, arguments and meaning are those of 0.1.11. What differs, and why:

| 0.1.11                                                      | here                                                                      |
|-------------------------------------------------------------|---------------------------------------------------------------------------|
| Ray hosts the plane; one per cluster                        | `init` starts it on this host; others attach by RL_TRANSFERQUEUE_PLANE,   |
|                                                             | or by a named actor where Ray runs                                        |
| reads drop rows and fields that are not there               | StorageKeyNotFoundError (KeyError, ValueError) names them                 |
| a put the controller refuses is reported as done            | raises, and stores nothing                                                |
| BatchMeta.select_fields drops unknown names                 | FieldNotFoundError (KeyError)                                             |
| put through metadata of cleared rows brings them back       | StorageKeyNotFoundError                                                   |
| global_indexes are used again                               | never                                                                     |
| get_meta sleeps in the controller, for all clients          | waits for the event; `controller.fetch_timeout_s`, NotReadyError          |
| samplers run in the controller                              | in the asking process; row claims are atomic, and what was decided for a  |
|                                                             | (dp_rank, batch_index) is kept in the plane for all processes             |
| data_parser is shipped by cloudpickle to the storage        | runs in the process that puts                                             |
| non-tensor values and tags may be pickled                   | None, bools, numbers, strings, bytes, tensors, arrays, and lists, tuples  |
|                                                             | and dicts of them; others, such as sets, raise SchemaError                |
| rows of several element types get that of the first row     | one that holds all of them, float64 for whole numbers beside floats       |
| total_storage_size bounds rows, and puts beyond it raise    | ignored; `rl_transferqueue.capacity_mb` bounds bytes, and puts wait       |
| checkpoints are pickles, and need the same number of units  | msgpack and wire format 1, any number of units; row numbers are new       |
| StreamingDataset polls and keeps every batch                | waits for the event and keeps what `step` has not released                |
"""

from rl_transferqueue.compat.client import AsyncTransferQueueClient, TransferQueueClient
from rl_transferqueue.compat.dataloader import StreamingDataLoader, StreamingDataset
from rl_transferqueue.compat.errors import (
    FieldNotFoundError,
    KeyNotFoundError,
    NotInitializedError,
    NotReadyError,
    StorageKeyNotFoundError,
)
from rl_transferqueue.compat.kv import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
    load_checkpoint,
    save_checkpoint,
)
from rl_transferqueue.compat.metadata.batch_meta import BatchMeta
from rl_transferqueue.compat.metadata.kv_batch_meta import KVBatchMeta
from rl_transferqueue.compat.runtime import close, get_client, get_metrics_endpoint, init
from rl_transferqueue.compat.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)

__all__ = [
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "FieldNotFoundError",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "KeyNotFoundError",
    "NotInitializedError",
    "NotReadyError",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
