"""The vocabulary of the stack: batches, their metadata, schemas, wire format and ports. Needs numpy and msgspec only."""

from rl_protocol.batch import BatchData
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
    WorkerError,
)
from rl_protocol.keys import RowKey
from rl_protocol.meta import KVBatchMeta, Scalar, Tag
from rl_protocol.partition import Partitionable, balanced_parts, even_sizes
from rl_protocol.schema import AlignmentLaw, BatchSchema, ColumnSpec, LengthIsSum, SameLength
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
    "WorkerError",
    "balanced_parts",
    "dense",
    "even_sizes",
    "ragged",
]
