"""Errors on the wire: by name, from a closed table."""

from __future__ import annotations

from rl_protocol import errors
from rl_protocol.errors import DataPlaneError, RLError
from rl_transferqueue.wire.messages import Failure

ERRORS: dict[str, type[RLError]] = {
    cls.__name__: cls
    for cls in (
        errors.BatchError,
        errors.CapacityTimeout,
        errors.ConflictError,
        errors.DataLostError,
        errors.DataPlaneError,
        errors.DuplicateKeyError,
        errors.MissingDataError,
        errors.OutputError,
        errors.PlaneLostError,
        errors.PlaneTimeout,
        errors.WireError,
    )
}
"""Errors that are sent over the wire, by name."""


def failure(error: RLError) -> Failure:
    """An error as an answer."""
    name = type(error).__name__
    return Failure(name if name in ERRORS else DataPlaneError.__name__, error.message)


def error_of(answer: Failure) -> RLError:
    """The error to raise at the caller."""
    return ERRORS.get(answer.error, DataPlaneError)(answer.message)
