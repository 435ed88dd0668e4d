"""The error tree of the stack; every error descends from RLError.

    RLError
    ├── ConfigError (ValueError)            a setting is wrong; the process exits with code 2
    ├── SchemaError (ValueError)            a row or column breaks its declared contract
    ├── BatchError (ValueError)             an operation on a batch can't be carried out
    │   └── UnknownNameError (LookupError)  a field, row or key does not exist
    ├── WireError (ValueError)              the bytes are not a batch of this wire version
    ├── DataPlaneError
    │   ├── MissingDataError (LookupError)  requested rows or columns are not in the plane
    │   │   └── DataLostError               they were lost with a storage unit
    │   ├── DuplicateKeyError (ValueError)
    │   ├── ConflictError                   a row is not as the caller expects
    │   ├── CapacityTimeout (TimeoutError)  the plane stayed full until the deadline
    │   ├── PlaneTimeout (TimeoutError)     the deadline of a call passed
    │   └── PlaneLostError (ConnectionError) the controller or a storage unit is gone
    ├── WeightSyncError                     weights were not moved, verified or activated
    ├── RolloutError                        an engine could not generate
    ├── RewardError                         a reward function failed on a named sample
    ├── WorkerError                         a worker process failed or was late
    │   └── WorkerDiedError                 it is gone and may be replaced
    ├── HangError (TimeoutError)            nothing in a run has moved for some time
    └── OutputError (OSError)               a file of the run can't be written

A message says what was wrong, what was got and what to set. An error carries one message, so it
pickles, and keeps further facts as attributes. Add a class only when a caller handles it
differently from its parent.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for malformed bytes. Catch all three when the bytes come from outside."""


def described_error(error: BaseException) -> str:
    """Kind and message of an exception of user code, whose `__str__` may raise."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """The message of an exception of user code, whose `__str__` may raise."""
    try:
        return str(error)
    except Exception as raised:  # noqa: BLE001 - user code
        return f"its __str__ raised {type(raised).__name__}"


def located_error(error: BaseException, package: str = "") -> str:
    """Kind, message and place of an exception of user code; for `package` see `place_of_error`."""
    place = place_of_error(error, package)
    return f"{described_error(error)} ({place})" if place else described_error(error)


def place_of_error(error: BaseException, package: str = "") -> str:
    """Where user code raised an exception, as `path.py:3`: the innermost line in the file of the
    function that was called. Empty: the call itself failed.

    User code is what the module that caught the exception has called. Where that is a class whose
    methods may be those of a base class in `package`, it is what the modules of `package` called.
    """
    frames = [(one.f_code.co_filename, line, one.f_globals) for one, line in traceback.walk_tb(error.__traceback__)]
    called = [
        (file, line)
        for file, line, names in frames
        if file != frames[0][0] and "importlib" not in file and names.get("__name__", "").split(".")[0] != package
    ]
    lines = [line for file, line in called if file == called[0][0]]
    return f"{called[0][0]}:{lines[-1]}" if called else ""


class user_code:  # noqa: N801 - used as a function
    """A context in which user code runs: an RLError passes, any other Exception becomes one.

    Args:
        as_error: makes the error from kind, message and place of the exception.
        package: see `located_error`, which describes the exception.
    """

    def __init__(self, as_error: Callable[[str], RLError], package: str = "") -> None:
        self._as_error = as_error
        self._package = package

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A generator with @contextmanager would be the first frame in the traceback of the error,
        # and `place_of_error` would name its caller as the place.
        if isinstance(error, Exception) and not isinstance(error, RLError):
            raise self._as_error(located_error(error, self._package)) from error


class RLError(Exception):
    """Root of every error raised by the packages of this stack.

    Args:
        message: one paragraph: what was wrong, what was got, what to set.
        **facts: further facts for handlers, kept as attributes and preserved by pickling.
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
    """The batch does not have the requested field, row or key."""


class WireError(RLError, ValueError):
    """The bytes are not a batch in the wire format this version reads."""


class DataPlaneError(RLError):
    """Base class of data-plane errors."""


class MissingDataError(DataPlaneError, LookupError):
    """Requested rows or columns are not in the plane."""


class DataLostError(MissingDataError):
    """Requested columns were lost with their storage unit and must be produced again."""


class ConflictError(DataPlaneError):
    """A row is not as the caller expects, or another client took it first; nothing was changed."""


class DuplicateKeyError(DataPlaneError, ValueError):
    """A key occurs twice in one call."""


class CapacityTimeout(DataPlaneError, TimeoutError):
    """The plane was full until the deadline of a put, of which nothing was stored, or of a read of
    rows that are on a disk."""


class PlaneTimeout(DataPlaneError, TimeoutError):
    """The deadline of a call passed before the answer arrived."""


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
    """A worker process is gone, together with its unsaved state; another process may replace it."""


class HangError(RLError, TimeoutError):
    """Nothing in a run has moved for some time; says who waits for what."""


class OutputError(RLError, OSError):
    """A file of the run can't be written."""
