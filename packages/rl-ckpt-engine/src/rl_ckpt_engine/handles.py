"""How the manager talks to the processes that hold weights. Only plain numbers, bytes and structs cross these calls.

An application implements both over its own remote calls, each method forwarding to the method of the same name of a SenderEndpoint or
ReceiverEndpoint. A method MUST raise only RLError, TimeoutError or OSError: translate the errors of the remote-call library.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec


class ReceiveAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A receiver holds a version, whole and verified, but not active."""

    version: int
    digest: bytes
    """Digest of the manifest that was received."""
    seconds: float
    """Time the receiver spent."""


class SenderHandle(Protocol):
    """Whoever has the newest weights."""

    async def send(self, version: int, timeout_s: float) -> bytes:
        """Publish the weights as `version`; returns the encoded Manifest."""
        ...

    async def finalize(self, version: int) -> None:
        """Every live receiver is done with the versions before `version`."""
        ...

    async def abort(self) -> None:
        """Take back what was sent and not finalized."""
        ...


class ReceiverHandle(Protocol):
    """One rollout replica."""

    @property
    def name(self) -> str:
        """Unique among the replicas."""
        ...

    async def pause(self, timeout_s: float) -> None:
        """Stop admitting requests, and return when weights may be replaced."""
        ...

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        """Get and verify the weights; the active ones stay."""
        ...

    async def activate(self, version: int, timeout_s: float) -> int:
        """Load what was received; returns the version that is active now."""
        ...

    async def resume(self, timeout_s: float) -> None:
        """Admit requests again."""
        ...


@runtime_checkable
class CachingHandle(Protocol):
    """A sender or receiver that can serve the version it has to late joiners; offering this is optional."""

    async def republish(self, timeout_s: float) -> bytes:
        """Serve it; returns the encoded Manifest, which names the same version, tensors and digests."""
        ...
