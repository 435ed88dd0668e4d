"""The API of TransferQueue 0.1.11 on this data plane: `import rl_transferqueue.compat as tq`.

TransferQueue is the package `transfer_queue`. Names, arguments and results are those of its
release 0.1.11. Needs the extra `[compat]` (torch, tensordict); Ray is optional. Differences:

| TransferQueue 0.1.11                         | here                                              |
|----------------------------------------------|---------------------------------------------------|
| Ray hosts one plane per cluster              | `init` starts it on this host; other processes    |
|                                              | attach by RL_TRANSFERQUEUE_PLANE or a Ray actor   |
| reads drop missing rows and fields           | StorageKeyNotFoundError (KeyError, ValueError)    |
| a put that the controller refuses looks done | raises and stores nothing                         |
| BatchMeta.select_fields drops unknown names  | FieldNotFoundError (KeyError)                     |
| put with metadata of cleared rows            | StorageKeyNotFoundError                           |
| restores the rows                            |                                                   |
| global_indexes are reused                    | never reused                                      |
| get_meta blocks the controller for all       | waits for an event up to                          |
| clients                                      | `controller.fetch_timeout_s`, then NotReadyError  |
| samplers run in the controller               | in the calling process; claims are atomic, and    |
|                                              | the plane keeps what a (dp_rank, batch_index) got |
| data_parser runs in the storage (cloudpickle)| in the process that puts                          |
| non-tensor values and tags may be pickled    | None, bools, numbers, strings, bytes, tensors,    |
|                                              | arrays, and lists, tuples and dicts of them;      |
|                                              | anything else (such as a set) raises SchemaError  |
| rows of mixed dtypes take the first row's    | a dtype that holds all of them; float64 for       |
|                                              | integers beside floats                            |
| total_storage_size limits rows; a put beyond | ignored; `rl_transferqueue.capacity_mb` limits    |
| it raises                                    | bytes, and a put waits for room                   |
| checkpoints are pickles for a fixed number   | msgpack and wire format 1, for any number of      |
| of units                                     | units; loading assigns new global_indexes         |
| StreamingDataset polls and keeps all batches | waits for an event; `step` releases batches       |
"""

try:
    from rl_transferqueue.compat.client import AsyncTransferQueueClient, TransferQueueClient
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed; pip install 'rl-transferqueue[compat]'", name=error.name
    ) from error
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
from rl_transferqueue.compat.lifecycle import close, get_client, get_metrics_endpoint, init
from rl_transferqueue.compat.metadata.batch_meta import BatchMeta
from rl_transferqueue.compat.metadata.kv_batch_meta import KVBatchMeta
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
