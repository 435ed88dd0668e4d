"""The interface through which checkpoints save and resume a model under training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

Write = Callable[[Path], Sequence[Path]]
"""Writes a copied state into a folder, from any thread; returns the files."""


@runtime_checkable
class Resumable(Protocol):
    """A model under training whose state can be saved and restored.

    With several ranks, each call is made on all of them.
    """

    def snapshot(self) -> Write:
        """Copy this rank's weights, optimizer state, counters and random state."""
        ...

    def state_digest(self) -> str:
        """SHA-256 of this rank's weights and optimizer state."""
        ...

    def restore(self, folder: Path) -> None:
        """Restore a snapshot, which may have been written by any number of ranks.

        Raises:
            ConfigError: it is the state of another model.
        """
        ...


@runtime_checkable
class Exportable(Protocol):
    """A policy that can be exported for users during training."""

    def export(self) -> Write:
        """Copy the policy, to be written as `save_pretrained` writes it."""
        ...
