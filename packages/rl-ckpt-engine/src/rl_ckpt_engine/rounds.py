"""One synchronisation, from the weights of the trainer to replicas that generate with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from rl_ckpt_engine.groups import Mover
from rl_ckpt_engine.handles import ReceiveAck, ReceiverHandle, SenderHandle
from rl_ckpt_engine.manifest import Manifest
from rl_ckpt_engine.phases import Outcome, call_all, call_one, listed
from rl_protocol.errors import WeightSyncError

_log = logging.getLogger(__name__)
_SENDER = "the sender"
_TOLD_WITHIN_S = 5.0  # a replica that is out is asked to stop, and not waited for as one that is needed
T = TypeVar("T")


class SyncRound:
    """Moves one version, once: make it, await `run`, read the attributes (they are filled in even when `run` raises).

    Args:
        sender: has the weights.
        receivers: name -> replica.
        version: to be sent.
        timeout_s: deadline of each phase in seconds.
        mover: gets the bytes to the receivers.
        stopped: receivers were told to generate nothing; nobody is resumed.

    Attributes:
        manifest: what was sent; None when sending failed.
        active: names of the receivers that generate with the version.
        failed: name -> why it does not have the version.
        stuck: name -> why it does not go on with its old weights, although nobody has new ones.
        seconds: phase -> seconds until its slowest receiver answered; `receive` also as its parts `move` and `verify`.
        phase: that has begun last.
    """

    def __init__(
        self,
        sender: SenderHandle,
        receivers: Mapping[str, ReceiverHandle],
        version: int,
        timeout_s: float,
        mover: Mover,
        *,
        stopped: bool = False,
    ) -> None:
        self._sender = sender
        self._receivers = dict(receivers)
        self._version = version
        self._timeout_s = timeout_s
        self._mover = mover
        self._stopped = stopped
        self.manifest: Manifest | None = None
        self.active: tuple[str, ...] = ()
        self.failed: dict[str, str] = {}
        self.stuck: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.phase = "send"
        self._moved = False

    async def run(self) -> None:
        """Send, receive and verify, activate; then, whatever happened, finalize or abort the sender.

        Replicas generate with their old weights until they activate the new ones. One that did not is told to stop when another did; when
        none did, all go on with their old weights.

        Raises:
            WeightSyncError: the sender failed, or no receiver activated the version; names each and why.
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

    async def _transfer(self) -> None:
        limit = self._timeout_s
        data, manifest = await self._send()
        acks = await self._phase(
            "receive", tuple(self._receivers), lambda handles: self._mover.move(data, handles, limit)
        )
        self.seconds["verify"] = max(ack.verify_seconds for ack in acks.values())
        self.seconds["move"] = max(ack.seconds - ack.verify_seconds for ack in acks.values())
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
        data = await call_one("send", _SENDER, self._timeout_s, self._sender.send(self._version, self._timeout_s))
        self.seconds["send"] = time.monotonic() - start
        manifest = Manifest.decode(data)
        if manifest.version != self._version:
            raise WeightSyncError(f"send: {_SENDER} was asked for version {self._version} and sent {manifest.version}.")
        self.manifest = manifest
        return data, manifest

    async def _phase(
        self,
        phase: str,
        names: tuple[str, ...] | list[str],
        call: Callable[[Mapping[str, ReceiverHandle]], Awaitable[Outcome[T]]],
    ) -> dict[str, T]:
        """Name -> answer of those that answered; raises when none did."""
        self.phase, start = phase, time.monotonic()
        outcome = await call({name: self._receivers[name] for name in names})
        self.seconds[phase] = time.monotonic() - start
        self.failed.update(outcome.failed)
        self._require(outcome.done)
        return outcome.done

    def _agrees(self, name: str, ack: ReceiveAck, manifest: Manifest) -> bool:
        if (ack.version, ack.digest) == (manifest.version, manifest.digest):
            return True
        self.failed[name] = (
            f"receive: {name} acknowledged version {ack.version}, digest {ack.digest.hex()}: not what was sent"
        )
        return False

    def _require(self, left: object) -> None:
        if not left:
            raise WeightSyncError(
                f"No receiver confirmed version {self._version} as active.{listed(self.failed)}",
                failed=dict(self.failed),
            )

    async def _stop_the_failed(self) -> None:
        """The others have left them behind; whoever does not hear it is in quarantine all the same."""
        limit = min(self._timeout_s, _TOLD_WITHIN_S)
        await call_all(
            "pause", {name: self._receivers[name] for name in self.failed}, limit, lambda handle: handle.pause(limit)
        )

    async def _resume(self) -> None:
        limit = self._timeout_s
        outcome = await call_all("resume", self._receivers, limit, lambda handle: handle.resume(limit))
        self.stuck = outcome.failed

    async def _settle(self) -> None:
        """Let the sender use the memory of older versions again, or take this one back; a failure is logged and met again at the next send."""
        done = self._sender.finalize(self._version) if self._moved else self._sender.abort()
        try:
            await call_one("finalize" if self._moved else "abort", _SENDER, self._timeout_s, done)
        except WeightSyncError as error:
            _log.warning("After the sync of version %d: %s.", self._version, error)


async def catch_up(handle: ReceiverHandle, manifest: Manifest, timeout_s: float, mover: Mover) -> None:
    """Bring one receiver to a version that is there already: pause, receive, activate.

    Raises:
        WeightSyncError: names the phase; the receiver stays paused.
    """
    name, version = handle.name, manifest.version
    await call_one("pause", name, timeout_s, handle.pause(timeout_s))
    moved = await mover.move(manifest.encode(), {name: handle}, timeout_s)
    if moved.failed:
        raise WeightSyncError(moved.failed[name])
    if (moved.done[name].version, moved.done[name].digest) != (version, manifest.digest):
        raise WeightSyncError(f"receive: {name} acknowledged version {moved.done[name].version}: not what was sent")
    active = await call_one("activate", name, timeout_s, handle.activate(version, timeout_s))
    if active != version:
        raise WeightSyncError(f"activate: {name} reports version {active}")
