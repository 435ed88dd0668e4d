"""How the manager talks to the processes that hold weights. Only plain numbers, bytes and structs cross these calls.

An application implements both over its own remote calls, each method forwarding to the method of the same name of a SenderEndpoint or
ReceiverEndpoint. A method MUST raise only RLError, TimeoutError or OSError: translate the errors of the remote-call library.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

Memory: TypeAlias = Literal["weights", "kv_cache"]
"""What a replica gives back when it sleeps, in the order in which it is had again."""


class ReceiveAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A receiver holds a version, whole and verified, but not active."""

    version: int
    digest: bytes
    """Digest of the manifest that was received."""
    seconds: float
    """Time the receiver spent."""
    verify_seconds: float = 0.0
    """Part of it that went to digests."""


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

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        """Get and verify the weights, beside requests that run; the active weights stay."""
        ...

    async def activate(self, version: int, timeout_s: float) -> int:
        """Admit nothing, load what was received, admit requests again; returns the version that is active now. Not while paused: then nothing
        is admitted until `resume`."""
        ...

    async def pause(self, timeout_s: float) -> None:
        """Admit no requests and end those that run, until `resume`."""
        ...

    async def resume(self, timeout_s: float) -> None:
        """Admit requests again."""
        ...


@runtime_checkable
class SleepingHandle(ReceiverHandle, Protocol):
    """A replica that can give memory back to others on its device; offering this is optional."""

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Give memory back until `wake`: at level 1 the weights are kept aside, at level 2 they are given up and must be sent again."""
        ...

    async def wake(self, part: Memory | None, timeout_s: float) -> None:
        """Have one part of the memory again, or all of it."""
        ...


@runtime_checkable
class CachingHandle(Protocol):
    """A sender or receiver that can serve the version it has to late joiners; offering this is optional."""

    async def republish(self, timeout_s: float) -> bytes:
        """Serve it; returns the encoded Manifest, which names the same version, tensors and digests."""
        ...


@runtime_checkable
class GroupHandle(Protocol):
    """A sender or receiver of an engine whose members move the bytes in a group."""

    async def prepare(self) -> bytes:
        """Its metadata; see CheckpointEngine.prepare."""
        ...

    async def join(self, member: bytes, timeout_s: float) -> None:
        """Join the group with this part of the topology; all members are called at once."""
        ...


@runtime_checkable
class GroupSenderHandle(GroupHandle, SenderHandle, Protocol):
    """The sender of such an engine."""

    async def serve(self, manifest: bytes, timeout_s: float) -> None:
        """Take part in moving a version that was sent, while all receivers receive it."""
        ...
