"""The vocabulary of the stack: batches, their metadata, schemas, wire format and ports. Needs numpy and msgspec only."""

from rl_protocol.arrays import pack_arrays, unpack_arrays
from rl_protocol.batch import BatchData
from rl_protocol.checked import with_schemas
from rl_protocol.columns import Column, DenseColumn, ObjectColumn, RaggedColumn, dense, ragged
from rl_protocol.errors import (
    BatchError,
    CapacityTimeout,
    ConfigError,
    ConflictError,
    DataLostError,
    DataPlaneError,
    DuplicateKeyError,
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
from rl_protocol.keys import RowKey
from rl_protocol.meta import KVBatchMeta, Scalar, Tag, TagRows
from rl_protocol.partition import Partitionable, balanced_parts, even_sizes
from rl_protocol.schema import AlignmentLaw, BatchSchema, ColumnSpec, LengthIsProduct, LengthIsSum, SameLength
from rl_protocol.weights import WeightTensor

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
    "DuplicateKeyError",
    "KVBatchMeta",
    "LengthIsProduct",
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
    "TagRows",
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
