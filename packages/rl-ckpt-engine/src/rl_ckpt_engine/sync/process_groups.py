"""Let receivers receive a version: each on its own, or all together in a process group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Protocol

from rl_ckpt_engine.endpoints.receiver import ReceiveAck, ReceiverHandle
from rl_ckpt_engine.endpoints.sender import SenderHandle
from rl_ckpt_engine.engines.contract import CheckpointEngine
from rl_ckpt_engine.sync.peer_calls import Outcome, call_all, call_one
from rl_protocol.errors import WeightSyncError

_SENDER = "the sender"


class ReceiveStrategy(Protocol):
    """How receivers receive a version that was sent."""

    async def prefetch(
        self, version: int, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Mapping[str, str]:
        """Let receivers that can start to receive the version, while it is being sent; returns
        those that failed, with reasons."""
        ...

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        """Let all receivers receive; returns acknowledgments, and reasons of those that failed."""
        ...


class IndependentReceive:
    """Each receiver receives independently of the others, and says whether it can prefetch.

    Args:
        prefetch: let those that can.
    """

    def __init__(self, *, prefetch: bool) -> None:
        self._prefetch = prefetch
        self._prefetching: set[str] = set()

    async def prefetch(
        self, version: int, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Mapping[str, str]:
        able = {name: handle for name, handle in receivers.items() if name in self._prefetching}
        called = await call_all("prefetch", able, timeout_s, lambda handle: handle.prefetch(version, timeout_s))
        return called.failed

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        outcome = await call_all("receive", receivers, timeout_s, lambda handle: handle.receive(manifest, timeout_s))
        self._prefetching -= receivers.keys()
        self._prefetching |= {name for name, ack in outcome.done.items() if self._prefetch and ack.prefetches}
        return outcome


class LocalReceive:
    """Each receiver receives from the sender in its own process; all of them sent the same weights.

    Args:
        manifests: name of the receiver -> what that sender sent; the others get the manifest that
            `move` is called with.
    """

    def __init__(self, manifests: Mapping[str, bytes]) -> None:
        self._manifests = manifests

    async def prefetch(
        self, version: int, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Mapping[str, str]:
        """Do nothing: the strategy of one version that has been sent."""
        del version, receivers, timeout_s
        return {}

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        return await call_all(
            "receive",
            receivers,
            timeout_s,
            lambda handle: handle.receive(self._manifests.get(handle.name, manifest), timeout_s),
        )


class GroupReceive:
    """Sender and receivers receive together in a process group, which is kept until its members
    change.

    If one member fails, the group fails for all. Then every receiver is asked for new metadata.
    Receivers that don't answer are dropped and the others retry in a new group. If all answer, they
    retry once.

    Args:
        engine: class of the engine.
        sender: handle of the sender.
    """

    def __init__(self, engine: type[CheckpointEngine], sender: SenderHandle) -> None:
        self._engine = engine
        self._sender = sender
        self._members: tuple[str, ...] = ()

    async def prefetch(
        self, version: int, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Mapping[str, str]:
        """Do nothing: the group moves a version when all members are ready."""
        del version, receivers, timeout_s
        return {}

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        """Receive in the group; takes at most 3 * (number of receivers + 1) deadlines."""
        left, failed = dict(receivers), dict[str, str]()
        received: Outcome[ReceiveAck] = Outcome({}, {})
        served, retried = "", False
        while left:
            gone = await self._form(left, timeout_s)
            failed |= gone
            left = {name: handle for name, handle in left.items() if name not in gone}
            served, received = await asyncio.gather(
                self._serve(manifest, timeout_s),
                call_all("receive", left, timeout_s, lambda handle: handle.receive(manifest, timeout_s)),
            )
            if not served and not received.failed:
                return Outcome(received.done, failed)
            self._members = ()
            if not gone and retried:
                break
            retried = True
        return Outcome(
            received.done, failed | {name: _with(reason, served) for name, reason in received.failed.items()}
        )

    async def _form(self, receivers: Mapping[str, ReceiverHandle], timeout_s: float) -> dict[str, str]:
        """Form a group unless there is one of these members.

        Returns the receivers that failed to prepare, with reasons. A failed join shows when the
        group is used.
        """
        if self._members == tuple(receivers):
            return {}
        prepared = await call_all("prepare", receivers, timeout_s, lambda handle: handle.prepare())
        if not prepared.done:
            return prepared.failed
        sender = await call_one("prepare", _SENDER, timeout_s, self._sender.prepare())
        topology = self._engine.build_topology(sender, list(prepared.done.values()))
        members = dict(zip(prepared.done, topology.receivers, strict=True))
        await asyncio.gather(
            _reason(call_one("join", _SENDER, timeout_s, self._sender.join(topology.sender, timeout_s))),
            call_all(
                "join",
                {name: receivers[name] for name in members},
                timeout_s,
                lambda handle: handle.join(members[handle.name], timeout_s),
            ),
        )
        self._members = tuple(members)
        return prepared.failed

    async def _serve(self, manifest: bytes, timeout_s: float) -> str:
        return await _reason(call_one("serve", _SENDER, timeout_s, self._sender.serve(manifest, timeout_s)))


def receive_strategy(engine: type[CheckpointEngine] | None, sender: SenderHandle, *, prefetch: bool) -> ReceiveStrategy:
    """The strategy for an engine; without an engine, receivers receive independently."""
    if engine is None or engine.capabilities.elastic:
        return IndependentReceive(prefetch=prefetch)
    return GroupReceive(engine, sender)


def _with(reason: str, served: str) -> str:
    return f"{reason} ({served})" if served else reason


async def _reason(call: Awaitable[object]) -> str:
    """Why the call failed; empty if it succeeded."""
    try:
        await call
    except WeightSyncError as error:
        return error.message
    return ""
