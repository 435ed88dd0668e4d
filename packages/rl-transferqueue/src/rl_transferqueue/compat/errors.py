"""Errors of the compatible API. Each is of our tree and also of the standard class that 0.1.11 raises in that place.

StorageKeyNotFoundError  MissingDataError, KeyError, ValueError   rows or columns asked for are not there
FieldNotFoundError       UnknownNameError, KeyError               a field that the metadata does not have
KeyNotFoundError         UnknownNameError, RuntimeError           a key that the metadata does not have
NotReadyError            PlaneTimeout, RuntimeError               too little data until the deadline
NotInitializedError      PlaneLostError, RuntimeError, AssertionError   no plane: `init` was not called
UnevenPartsError         BatchError, AssertionError               lengths that can't be partitioned as asked
"""

from __future__ import annotations

from rl_protocol.errors import BatchError, MissingDataError, PlaneLostError, PlaneTimeout, UnknownNameError


class StorageKeyNotFoundError(MissingDataError, KeyError, ValueError):
    """Rows or columns asked for are not in the plane; nothing partial is returned."""


class FieldNotFoundError(UnknownNameError, KeyError):
    """A field that this metadata does not have."""


class KeyNotFoundError(UnknownNameError, RuntimeError):
    """A key that this metadata does not have."""


class NotReadyError(PlaneTimeout, RuntimeError):
    """Too little data until the deadline of `get_meta`."""


class NotInitializedError(PlaneLostError, RuntimeError, AssertionError):
    """There is no plane yet, or not any more."""


class UnevenPartsError(BatchError, AssertionError):
    """Lengths that can't be partitioned as asked."""
