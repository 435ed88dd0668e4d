"""Every error of the stack descends from RLError, so that one except clause names them all.

    RLError
    ├── ConfigError (ValueError)            a setting is wrong; the process exits with code 2
    ├── SchemaError (ValueError)            a row or column breaks its declared contract
    ├── BatchError (ValueError)             an operation on a batch can't be carried out
    │   └── UnknownNameError (LookupError)  a field, row or key that is not there
    ├── WireError (ValueError)              bytes that are not a batch of this wire version
    ├── DataPlaneError
    │   ├── MissingDataError (LookupError)  rows or columns asked for are not in the plane
    │   │   └── DataLostError               they were, until the storage unit that held them died
    │   ├── DuplicateKeyError (ValueError)
    │   ├── ConflictError                   a row is not, or not any more, as the caller expected
    │   ├── CapacityTimeout (TimeoutError)  the plane stayed full until the deadline
    │   ├── PlaneTimeout (TimeoutError)     the deadline of a call passed
    │   └── PlaneLostError (ConnectionError) controller or storage unit is gone
    ├── WeightSyncError                     weights were not moved, verified or activated
    ├── RolloutError                        an engine could not generate
    ├── RewardError                         a reward function failed on a named sample
    ├── WorkerError                         a worker process failed or was late
    │   └── WorkerDiedError                 it is gone; another may take its place
    └── OutputError (OSError)               a file of the run can't be written

Rules: the message says what was wrong, what was got and what to set; an error carries one message (so it pickles) and keeps
further facts as attributes. Add a class only when a caller would handle it differently from its parent.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be: all three must be caught where bytes come from elsewhere."""


class RLError(Exception):
    """Root of every error raised by the packages of this stack.

    Args:
        message: one paragraph: what was wrong, what was got, what to set.
        **facts: anything a handler may want to read, kept as attributes (and through pickling).
    """

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(facts)

    def __str__(self) -> str:
        return self.message


class ConfigError(RLError, ValueError):
    """A setting is unknown, of the wrong type, out of range or in conflict with another."""


class SchemaError(RLError, ValueError):
    """A batch does not meet its schema; names row, column, expected and got."""


class BatchError(RLError, ValueError):
    """An operation on a batch or its metadata can't be carried out."""


class UnknownNameError(BatchError, LookupError):
    """A field, row or key was asked for that the batch does not have."""


class WireError(RLError, ValueError):
    """The bytes are not a batch in the wire format this version reads."""


class DataPlaneError(RLError):
    """Something went wrong in the data plane."""


class MissingDataError(DataPlaneError, LookupError):
    """Rows or columns that were asked for are not in the plane; reads are strict."""


class DataLostError(MissingDataError):
    """Columns that were asked for were lost with the storage unit that held them; whoever made them must make them again."""


class ConflictError(DataPlaneError):
    """A row is not as the caller expected, or someone else took it first; nothing was changed. Look again, then decide anew."""


class DuplicateKeyError(DataPlaneError, ValueError):
    """A key occurs twice in one call."""


class CapacityTimeout(DataPlaneError, TimeoutError):
    """The plane was full until the deadline of a put; nothing was stored."""


class PlaneTimeout(DataPlaneError, TimeoutError):
    """The deadline of a call passed before it was answered."""


class PlaneLostError(DataPlaneError, ConnectionError):
    """The controller or a storage unit died or closed."""


class WeightSyncError(RLError):
    """Weights could not be sent, received, verified or activated."""


class RolloutError(RLError):
    """A rollout engine could not generate."""


class RewardError(RLError):
    """A reward function failed; names the sample."""


class WorkerError(RLError):
    """A worker process failed, died, or was late."""


class WorkerDiedError(WorkerError):
    """A worker process is gone, with all that it had not handed on; another process may take its place."""


class OutputError(RLError, OSError):
    """A file of the run can't be written."""
