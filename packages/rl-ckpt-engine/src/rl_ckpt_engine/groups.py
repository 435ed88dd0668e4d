"""How the bytes of a sync get to the receivers: each fetches by itself, or sender and receivers move them together in a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Protocol

from rl_ckpt_engine.engine import CheckpointEngine
from rl_ckpt_engine.handles import GroupHandle, GroupSenderHandle, ReceiveAck, ReceiverHandle, SenderHandle
from rl_ckpt_engine.phases import Outcome, call_all, call_one
from rl_protocol.errors import ConfigError, WeightSyncError

_SENDER = "the sender"


class Mover(Protocol):
    """Lets receivers receive a version that was sent."""

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        """Acknowledgements, and for each other receiver why it has not received the version."""
        ...


class Fetching:
    """Receivers come and go without the others noticing."""

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        """See Mover."""
        return await call_all("receive", receivers, timeout_s, lambda handle: handle.receive(manifest, timeout_s))


class Group:
    """Forms a group of the sender and the receivers of a sync, keeps it while they stay the same, and forms another when it broke.

    When one member fails, all do. Then all are asked for new metadata: who does not answer is out, and the others try again. When everybody
    answers they try again once.

    Args:
        engine: its class.
        sender: a GroupSenderHandle.

    Raises:
        ConfigError: the sender's handle can't take part in a group.
    """

    def __init__(self, engine: type[CheckpointEngine], sender: SenderHandle) -> None:
        if not isinstance(sender, GroupSenderHandle):
            raise ConfigError(
                f"Engine {engine.name!r} moves weights in a group; the sender's handle {type(sender).__name__} has no methods prepare, join "
                "and serve. Add them, or set checkpoint_engine.backend to shm, tcp or disk."
            )
        self._engine = engine
        self._sender = sender
        self._members: tuple[str, ...] = ()

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        """See Mover; takes at most three deadlines for each receiver and three more."""
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
        """Name of each receiver that could not be asked -> why. That joining failed shows when the group is used."""
        if self._members == tuple(receivers):
            return {}
        prepared = await call_all("prepare", receivers, timeout_s, lambda handle: _of_group(handle).prepare())
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
                lambda handle: _of_group(handle).join(members[handle.name], timeout_s),
            ),
        )
        self._members = tuple(members)
        return prepared.failed

    async def _serve(self, manifest: bytes, timeout_s: float) -> str:
        return await _reason(call_one("serve", _SENDER, timeout_s, self._sender.serve(manifest, timeout_s)))


def mover(engine: type[CheckpointEngine] | None, sender: SenderHandle) -> Mover:
    """The one that fits the engine; without an engine, receivers fetch."""
    return Fetching() if engine is None or engine.capabilities.elastic else Group(engine, sender)


def _of_group(handle: ReceiverHandle) -> GroupHandle:
    if not isinstance(handle, GroupHandle):
        raise WeightSyncError(f"the handle {type(handle).__name__} has no methods prepare and join")
    return handle


def _with(reason: str, served: str) -> str:
    return f"{reason} ({served})" if served else reason


async def _reason(call: Awaitable[object]) -> str:
    """Why it failed; empty when it did not."""
    try:
        await call
    except WeightSyncError as error:
        return error.message
    return ""
