"""Types shared by the packages: batches, metadata, schemas, wire format, ports and errors."""

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import Column, DenseColumn, ObjectColumn, RaggedColumn, dense, ragged
from rl_protocol.batch.kept_sets import KeptSets
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, LazyRows, Scalar, Tag
from rl_protocol.batch.packed_arrays import pack_arrays, unpack_arrays
from rl_protocol.batch.row_key import RowKey
from rl_protocol.batch.row_ops import Partitionable, balanced_parts, even_sizes
from rl_protocol.batch.schema import (
    AlignmentLaw,
    BatchSchema,
    ColumnSpec,
    DistinctIds,
    LengthIsProduct,
    LengthIsRuns,
    LengthIsSum,
    SameLength,
)
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import (
    BatchError,
    CapacityTimeout,
    ConfigError,
    ConflictError,
    DataLostError,
    DataPlaneError,
    DuplicateKeyError,
    HangError,
    MissingDataError,
    OutputError,
    PlaneLostError,
    PlaneTimeout,
    RewardError,
    RLError,
    RolloutError,
    SchemaError,
    UnknownNameError,
    WeightSyncError,
    WireError,
    WorkerDiedError,
    WorkerError,
)
from rl_protocol.ports.schema_checked import with_schemas

__version__ = "0.1.0"

__all__ = [
    "AlignmentLaw",
    "BatchData",
    "BatchError",
    "BatchSchema",
    "CapacityTimeout",
    "Column",
    "ColumnSpec",
    "ConfigError",
    "ConflictError",
    "DataLostError",
    "DataPlaneError",
    "DenseColumn",
    "DistinctIds",
    "DuplicateKeyError",
    "HangError",
    "KVBatchMeta",
    "KeptSets",
    "LazyRows",
    "LengthIsProduct",
    "LengthIsRuns",
    "LengthIsSum",
    "MissingDataError",
    "ObjectColumn",
    "OutputError",
    "Partitionable",
    "PlaneLostError",
    "PlaneTimeout",
    "RLError",
    "RaggedColumn",
    "RewardError",
    "RolloutError",
    "RowKey",
    "SameLength",
    "Scalar",
    "SchemaError",
    "Tag",
    "UnknownNameError",
    "WeightSyncError",
    "WeightTensor",
    "WireError",
    "WorkerDiedError",
    "WorkerError",
    "balanced_parts",
    "dense",
    "even_sizes",
    "pack_arrays",
    "ragged",
    "unpack_arrays",
    "with_schemas",
]
