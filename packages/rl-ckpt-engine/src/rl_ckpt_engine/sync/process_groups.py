"""Let receivers receive a version: each on its own, one for its host, or all together in a process
group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from rl_ckpt_engine.endpoints.receiver import ReceiveAck, ReceiverHandle
from rl_ckpt_engine.endpoints.sender import SenderHandle
from rl_ckpt_engine.engines.contract import CheckpointEngine
from rl_ckpt_engine.payload.manifest import Manifest
from rl_ckpt_engine.sync.peer_calls import Outcome, call_all, call_one
from rl_protocol.errors import WeightSyncError

_log = logging.getLogger(__name__)
_SENDER = "the sender"
RELAY_FROM = 2
"""Receivers of a host from which on one relays to the others. With two, a relay saves half of the
bytes on the network; over loopback it makes no difference."""
RELAY_BYTES = 64 << 20
"""Size of a version below which the two more calls would cost more than they save."""


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
    """Each receiver receives from the sender, and says whether it can prefetch and relay.

    Where a host has `RELAY_FROM` receivers that can relay, the first of them receives a version of
    at least `RELAY_BYTES` and relays it to the others; if it can't, they receive from the sender,
    too. Hosts are known after the first version.

    Args:
        prefetch: let those that can.
    """

    def __init__(self, *, prefetch: bool) -> None:
        self._prefetch = prefetch
        self._prefetching: set[str] = set()
        self._hosts: dict[str, str] = {}  # of the receivers that can relay
        self._large = False  # whether the last version was worth a relay

    async def prefetch(
        self, version: int, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Mapping[str, str]:
        relayed = {other for others in self._relays(receivers).values() for other in others}
        able = {name: handle for name, handle in receivers.items() if name in self._prefetching and name not in relayed}
        called = await call_all("prefetch", able, timeout_s, lambda handle: handle.prefetch(version, timeout_s))
        return called.failed

    async def move(
        self, manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float
    ) -> Outcome[ReceiveAck]:
        """See ReceiveStrategy; takes at most three deadlines."""
        self._large = Manifest.decode(manifest).tensor_nbytes >= RELAY_BYTES
        hosts = [(leader, *others) for leader, others in self._relays(receivers).items()]
        alone = receivers.keys() - {name for host in hosts for name in host}
        results = await asyncio.gather(
            _receive(manifest, {name: receivers[name] for name in alone}, timeout_s),
            *(_relay(manifest, {name: receivers[name] for name in host}, timeout_s) for host in hosts),
            return_exceptions=True,  # a bug in one call does not leave the others behind
        )
        outcomes: list[Outcome[ReceiveAck]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            outcomes.append(result)
        done = {name: ack for outcome in outcomes for name, ack in outcome.done.items()}
        failed = {name: reason for outcome in outcomes for name, reason in outcome.failed.items()}
        self._prefetching -= receivers.keys()
        self._prefetching |= {name for name, ack in done.items() if self._prefetch and ack.prefetches}
        self._hosts |= {name: ack.host for name, ack in done.items() if ack.host}
        return Outcome({name: done[name] for name in receivers if name in done}, failed)

    def _relays(self, receivers: Mapping[str, ReceiverHandle]) -> dict[str, list[str]]:
        """The receiver that relays a version as large as the last -> the others of its host."""
        if not self._large:
            return {}
        hosts: dict[str, list[str]] = {}
        for name in receivers:
            if name in self._hosts:
                hosts.setdefault(self._hosts[name], []).append(name)
        return {first: others for first, *others in hosts.values() if len(others) + 1 >= RELAY_FROM}


async def _receive(manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float) -> Outcome[ReceiveAck]:
    return await call_all("receive", receivers, timeout_s, lambda handle: handle.receive(manifest, timeout_s))


async def _relay(manifest: bytes, receivers: Mapping[str, ReceiverHandle], timeout_s: float) -> Outcome[ReceiveAck]:
    """Let the first receiver receive, and relay the version to the others of its host.

    The others acknowledge the manifest that was relayed; their acknowledgments are returned with
    the digest of the one that was sent.
    """
    first, *others = receivers
    led = await _receive(manifest, {first: receivers[first]}, timeout_s)
    offered = manifest
    if led.done:
        relayed = await call_all("relay", {first: receivers[first]}, timeout_s, lambda handle: handle.relay(timeout_s))
        for reason in relayed.failed.values():
            _log.warning("The other replicas of its host receive from the sender: %s.", reason)
        offered = relayed.done.get(first, manifest)
    sent, given = Manifest.decode(manifest), Manifest.decode(offered)
    if not given.same_weights(sent):
        _log.warning("%s relays other weights than those it received; they are not used.", first)
        offered, given = manifest, sent
    rest = await _receive(offered, {name: receivers[name] for name in others}, timeout_s)
    acks = {
        name: msgspec.structs.replace(ack, digest=sent.digest) if ack.digest == given.digest else ack
        for name, ack in rest.done.items()
    }
    return Outcome(led.done | acks, led.failed | rest.failed)


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
                _receive(manifest, left, timeout_s),
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
        sender = await call_one("prepare", _SENDER, timeout_s, self._sender.prepare)
        topology = self._engine.build_topology(sender, list(prepared.done.values()))
        members = dict(zip(prepared.done, topology.receivers, strict=True))
        await asyncio.gather(
            _reason("join", timeout_s, lambda: self._sender.join(topology.sender, timeout_s)),
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
        return await _reason("serve", timeout_s, lambda: self._sender.serve(manifest, timeout_s))


def receive_strategy(engine: type[CheckpointEngine] | None, sender: SenderHandle, *, prefetch: bool) -> ReceiveStrategy:
    """The strategy for an engine; without an engine, receivers receive independently."""
    if engine is None or engine.capabilities.elastic:
        return IndependentReceive(prefetch=prefetch)
    return GroupReceive(engine, sender)


def _with(reason: str, served: str) -> str:
    return f"{reason} ({served})" if served else reason


async def _reason(phase: str, timeout_s: float, call: Callable[[], Awaitable[object]]) -> str:
    """Why a call to the sender failed; empty if it succeeded."""
    try:
        await call_one(phase, _SENDER, timeout_s, call)
    except WeightSyncError as error:
        return error.message
    return ""
