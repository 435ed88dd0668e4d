"""Errors of the compatible API: each is an RLError and the built-in error that 0.1.11 raises.

StorageKeyNotFoundError  MissingDataError, KeyError, ValueError         rows or columns are missing
FieldNotFoundError       UnknownNameError, KeyError                     unknown field of metadata
KeyNotFoundError         UnknownNameError, RuntimeError                 unknown key of metadata
NotReadyError            PlaneTimeout, RuntimeError                     too few rows in time
NotInitializedError      PlaneLostError, RuntimeError, AssertionError   no plane; call `init`
UnevenPartsError         BatchError, AssertionError                     impossible partition
"""

from __future__ import annotations

from rl_protocol.errors import BatchError, MissingDataError, PlaneLostError, PlaneTimeout, UnknownNameError


class StorageKeyNotFoundError(MissingDataError, KeyError, ValueError):
    """Some of the rows or columns are not in the plane; nothing is returned."""


class FieldNotFoundError(UnknownNameError, KeyError):
    """The metadata has no such field."""


class KeyNotFoundError(UnknownNameError, RuntimeError):
    """The metadata has no such key."""


class NotReadyError(PlaneTimeout, RuntimeError):
    """Too few rows were ready before the deadline of `get_meta`."""


class NotInitializedError(PlaneLostError, RuntimeError, AssertionError):
    """No plane is running, or it has ended."""


class UnevenPartsError(BatchError, AssertionError):
    """The lengths can't be partitioned as asked."""
