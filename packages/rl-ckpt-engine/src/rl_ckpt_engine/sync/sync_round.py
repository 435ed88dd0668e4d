"""SyncRound: one synchronization from send to activation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rl_ckpt_engine.endpoints.receiver import ReceiveAck, ReceiverHandle
from rl_ckpt_engine.endpoints.sender import FollowerEndpoint, SendAck, SenderHandle
from rl_ckpt_engine.payload.manifest import Manifest
from rl_ckpt_engine.sync.peer_calls import Outcome, call_all, call_one, format_failures
from rl_ckpt_engine.sync.process_groups import LocalReceive, ReceiveStrategy
from rl_protocol.errors import WeightSyncError

_log = logging.getLogger(__name__)
_SENDER = "the sender"
_PAUSE_S = 5.0  # deadline for pausing a replica that failed, shorter than that of replicas in use
T = TypeVar("T")


class SyncRound:
    """One synchronization of one version. Await `run` once, then read the attributes.

    The attributes are filled in even if `run` raises.

    Args:
        sender: handle of the sender.
        receivers: name -> handle of the receiver.
        version: the version to send.
        timeout_s: deadline of each phase in seconds.
        receive_strategy: how the receivers receive.
        followers: the trainer's other ranks, which take part in reading the weights.
        local_senders: name of a receiver -> the rank in its process, which sends it the weights.
        stopped: generation was stopped on purpose; resume no receiver.

    Attributes:
        manifest: manifest of the version; None if sending failed.
        active: names of the receivers that activated the version.
        failed: name -> why the receiver does not have the version.
        not_resumed: name -> why the receiver could not resume with its old weights after a failed
            sync.
        seconds: phase -> seconds until the slowest receiver answered. `receive` is also split into
            `move` and `verify`.
        send_metrics: the engine's measurements of the send.
        prefetched_bytes: what each receiver from the sender had, at least, before it was asked to
            receive.
        relayed: number of receivers that copied the version from another on their host.
        phase: the current or last phase.
    """

    def __init__(
        self,
        sender: SenderHandle,
        receivers: Mapping[str, ReceiverHandle],
        version: int,
        timeout_s: float,
        receive_strategy: ReceiveStrategy,
        *,
        followers: Sequence[FollowerEndpoint] = (),
        local_senders: Mapping[str, SenderHandle] | None = None,
        stopped: bool = False,
    ) -> None:
        self._sender = sender
        self._receivers = dict(receivers)
        self._version = version
        self._timeout_s = timeout_s
        self._receive_strategy = receive_strategy
        self._followers = followers
        self._local_senders = dict(local_senders or {})
        self._local: dict[str, Manifest] = {}  # what they have sent, by receiver
        self._stopped = stopped
        self.manifest: Manifest | None = None
        self.active: tuple[str, ...] = ()
        self.failed: dict[str, str] = {}
        self.not_resumed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.send_metrics: dict[str, float] = {}
        self.prefetched_bytes = 0
        self.relayed = 0
        self.phase = "send"
        self._moved = False

    async def run(self) -> None:
        """Send, receive and verify, activate; finally finalize or abort the sender.

        Replicas generate with their old weights until they activate the new ones. If some activate
        the version, the others are paused. If none does, all continue with their old weights.

        Raises:
            WeightSyncError: the sender failed, or no receiver activated the version; names each
                with its reason.
        """
        try:
            await self._transfer()
        finally:
            try:
                if self.active:
                    await self._stop_the_failed()
                elif not self._stopped:
                    await self._resume()
            finally:
                await self._settle()

    @property
    def metrics(self) -> dict[str, float]:
        """Bytes of one copy of the model, duration of each phase in seconds, number of receivers
        that have the version, and the engine's measurements."""
        num_bytes = 0 if self.manifest is None else self.manifest.tensor_nbytes
        return {
            "version": float(self._version),
            "bytes": float(num_bytes),
            "receivers": float(len(self.active)),
            "prefetched_bytes": float(self.prefetched_bytes),
            "relayed": float(self.relayed),
            **{f"{phase}_seconds": spent for phase, spent in self.seconds.items()},
            **self.send_metrics,
        }

    async def _transfer(self) -> None:
        limit = self._timeout_s
        data, manifest = await self._send()
        acks = await self._phase(
            "receive",
            [name for name in self._receivers if name not in self.failed],
            lambda handles: self._receive_strategy.move(data, handles, limit),
        )
        self.seconds["verify"] = max(ack.verify_seconds for ack in acks.values())
        self.seconds["move"] = max(ack.seconds - ack.verify_seconds for ack in acks.values())
        self.prefetched_bytes = min((ack.prefetched_nbytes for ack in acks.values() if not ack.relayed), default=0)
        self.relayed = sum(ack.relayed for ack in acks.values())
        verified = [name for name, ack in acks.items() if self._agrees(name, ack, manifest)]
        self._require(verified)
        echoes = await self._phase(
            "activate",
            verified,
            lambda handles: call_all("activate", handles, limit, lambda h: h.activate(self._version, limit)),
        )
        for name, version in echoes.items():
            if version != self._version:
                self.failed[name] = f"activate: {name} reports version {version}"
        active = tuple(name for name in echoes if name not in self.failed)
        self._require(active)
        self.active = active
        self._moved = True

    async def _send(self) -> tuple[bytes, Manifest]:
        self.phase, start = "send", time.monotonic()
        sent, not_prefetching = await asyncio.gather(
            call_one("send", _SENDER, self._timeout_s, self._read),
            self._receive_strategy.prefetch(self._version, self._receivers, self._timeout_s),
            return_exceptions=True,  # a failed send does not leave calls behind
        )
        if isinstance(sent, BaseException):
            raise sent
        if isinstance(not_prefetching, BaseException):
            raise not_prefetching
        self.failed.update(not_prefetching)
        self.seconds["send"], self.send_metrics = time.monotonic() - start, sent.metrics
        manifest = Manifest.decode(sent.manifest)
        if manifest.version != self._version:
            raise WeightSyncError(f"send: {_SENDER} was asked for version {self._version} and sent {manifest.version}.")
        for name, local in self._local.items():
            if not local.same_weights(manifest):
                raise WeightSyncError(
                    f"send: the rank in the process of {name} has other weights of version {self._version} than {_SENDER}."
                )
        if self._local:
            self._receive_strategy = LocalReceive({name: local.encode() for name, local in self._local.items()})
        self.manifest = manifest
        return sent.manifest, manifest

    async def _read(self) -> SendAck:
        """Send, while the other ranks take part in reading the weights."""
        version, limit = self._version, self._timeout_s
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._sender.send(version, limit))
                local = {
                    name: tasks.create_task(rank.send(version, limit)) for name, rank in self._local_senders.items()
                }
                for rank in self._followers:
                    tasks.create_task(rank.follow(limit))
        except ExceptionGroup as failed:  # the first to fail: the others were cancelled because of it
            raise failed.exceptions[0] from None
        self._local = {name: Manifest.decode(task.result().manifest) for name, task in local.items()}
        return sending.result()

    async def _phase(
        self,
        phase: str,
        names: tuple[str, ...] | list[str],
        call: Callable[[Mapping[str, ReceiverHandle]], Awaitable[Outcome[T]]],
    ) -> dict[str, T]:
        """The answers by name; raises if no receiver answered."""
        self.phase, start = phase, time.monotonic()
        outcome = await call({name: self._receivers[name] for name in names})
        self.seconds[phase] = time.monotonic() - start
        self.failed.update(outcome.failed)
        self._require(outcome.done)
        return outcome.done

    def _agrees(self, name: str, ack: ReceiveAck, manifest: Manifest) -> bool:
        manifest = self._local.get(name, manifest)
        if (ack.version, ack.digest) == (manifest.version, manifest.digest):
            return True
        self.failed[name] = (
            f"receive: {name} acknowledged version {ack.version}, digest {ack.digest.hex()}, which is not what was sent"
        )
        return False

    def _require(self, left: object) -> None:
        if not left:
            raise WeightSyncError(
                f"No receiver confirmed version {self._version} as active.{format_failures(self.failed.values())}",
                failed=dict(self.failed),
            )

    async def _stop_the_failed(self) -> None:
        """Pause the receivers that failed. They are quarantined even if the call fails."""
        limit = min(self._timeout_s, _PAUSE_S)
        await call_all(
            "pause", {name: self._receivers[name] for name in self.failed}, limit, lambda handle: handle.pause(limit)
        )

    async def _resume(self) -> None:
        limit = self._timeout_s
        outcome = await call_all("resume", self._receivers, limit, lambda handle: handle.resume(limit))
        self.not_resumed = outcome.failed

    async def _settle(self) -> None:
        """Finalize or abort the senders. A failure is logged; the next send reports it again."""
        beside = {f"the sender beside {name}": rank for name, rank in self._local_senders.items()}
        for name, sender in {_SENDER: self._sender, **beside}.items():
            phase, end = (
                ("finalize", partial(sender.finalize, self._version)) if self._moved else ("abort", sender.abort)
            )
            try:
                await call_one(phase, name, self._timeout_s, end)
            except WeightSyncError as error:
                _log.warning("After the sync of version %d: %s.", self._version, error)
