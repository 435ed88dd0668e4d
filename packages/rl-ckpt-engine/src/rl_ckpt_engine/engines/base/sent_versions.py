"""SentVersions: state machine of the versions that a sender holds, without I/O.

idle --begin--> sending --publish--> pending --finalize--> committed (and idle)
                   \\__cancel__ idle      \\____abort____ idle, the committed version stays
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_protocol.errors import WeightSyncError

Held = TypeVar("Held")


@dataclass(frozen=True, slots=True)
class Published(Generic[Held]):
    """A version that receivers may read, and the object that holds its bytes."""

    version: int
    sync_id: bytes
    held: Held


class SentVersions(Generic[Held]):
    """At most one committed version and one that is being sent or pending."""

    def __init__(self) -> None:
        self.committed: Published[Held] | None = None
        self.pending: Published[Held] | None = None
        self._sending: int | None = None

    def begin(self, version: int) -> None:
        """Start sending `version`.

        Raises:
            WeightSyncError: another send is running, the last one was not finalized, or the version
                does not increase.
        """
        self.require_idle(f"Version {version} can't be sent")
        if version < 0 or (self.committed is not None and version <= self.committed.version):
            last = "none" if self.committed is None else self.committed.version
            raise WeightSyncError(
                f"Version {version} can't be sent: versions start at 0 and must increase; the last was {last}."
            )
        self._sending = version

    def require_idle(self, otherwise: str) -> None:
        """Check that a new version may be started.

        Raises:
            WeightSyncError: a send is running, or the last one was not finalized; begins with
                `otherwise`.
        """
        if self._sending is not None:
            raise WeightSyncError(f"{otherwise}: version {self._sending} is being sent.")
        if self.pending is not None:
            raise WeightSyncError(
                f"{otherwise}: receivers may still be reading version {self.pending.version}; finalize it, or abort it to give up on them."
            )

    def publish(self, published: Published[Held]) -> None:
        """End sending successfully: receivers may read."""
        self._sending = None
        self.pending = published

    def cancel(self) -> None:
        """End sending without a result; no effect after `publish`."""
        self._sending = None

    def finalize(self, version: int) -> Published[Held] | None:
        """Commit the pending version and return the one it replaces. Idempotent.

        Raises:
            WeightSyncError: `version` is neither pending nor committed.
        """
        if self.pending is not None and self.pending.version == version:
            former, self.committed, self.pending = self.committed, self.pending, None
            return former
        if self.pending is None and self.committed is not None and self.committed.version == version:
            return None
        raise WeightSyncError(
            f"Version {version} can't be finalized: pending is {_version(self.pending)}, committed is {_version(self.committed)}."
        )

    def abort(self) -> Published[Held] | None:
        """Remove the pending version and return it."""
        taken, self.pending = self.pending, None
        return taken

    def find(self, sync_id: bytes) -> Published[Held] | None:
        """The version of that sync, if it is still readable."""
        for published in (self.pending, self.committed):
            if published is not None and published.sync_id == sync_id:
                return published
        return None


def _version(published: Published[Held] | None) -> str:
    return "none" if published is None else str(published.version)
