"""LateJoin: bring one receiver to the version committed last."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial

from rl_ckpt_engine.endpoints.receiver import ReceiverHandle
from rl_ckpt_engine.endpoints.sender import SenderHandle
from rl_ckpt_engine.payload.manifest import Manifest
from rl_ckpt_engine.sync.peer_calls import call_one, format_failures
from rl_ckpt_engine.sync.process_groups import ReceiveStrategy
from rl_protocol.errors import WeightSyncError


class LateJoin:
    """Lets a receiver receive a version from the sender, or from a replica that has a copy.

    Args:
        sender: handle of the sender.
        replicas: name -> handle of the replicas that have the version.
        committed: manifest of the version, as it was sent.
        timeout_s: deadline of each phase in seconds.
        receive_strategy: how the receiver receives.
    """

    def __init__(
        self,
        sender: SenderHandle,
        replicas: Mapping[str, ReceiverHandle],
        committed: Manifest,
        timeout_s: float,
        receive_strategy: ReceiveStrategy,
    ) -> None:
        self._sources = {"the sender": sender, **replicas}
        self._committed = committed
        self._timeout_s = timeout_s
        self._receive_strategy = receive_strategy
        self._reasons: list[str] = []

    async def run(self, handle: ReceiverHandle) -> None:
        """Pause the receiver and let it receive and activate the version.

        Raises:
            WeightSyncError: no source could serve it; names each with its reason. The receiver
                stays paused.
        """
        async for manifest in self._offers():
            try:
                await self._catch_up(handle, manifest)
                return
            except WeightSyncError as error:
                self._reasons.append(str(error))
        raise WeightSyncError(
            f"Receiver {handle.name!r} could not catch up with version {self._committed.version}. It was not added and stays paused."
            f"{format_failures(self._reasons)} If the sender has dropped this version, call update_weights with a later one, "
            "then add the receiver again.",
            peer=handle.name,
        )

    async def _offers(self) -> AsyncGenerator[Manifest]:
        """Manifests of the version: as sent first, then as republished by sender and replicas."""
        yield self._committed
        limit = self._timeout_s
        for name, source in self._sources.items():
            try:
                manifest = Manifest.decode(await call_one("republish", name, limit, partial(source.republish, limit)))
            except WeightSyncError as error:
                self._reasons.append(str(error))
                continue
            if manifest.same_weights(self._committed):
                yield manifest

    async def _catch_up(self, handle: ReceiverHandle, manifest: Manifest) -> None:
        name, version, limit = handle.name, manifest.version, self._timeout_s
        await call_one("pause", name, limit, lambda: handle.pause(limit))
        moved = await self._receive_strategy.move(manifest.encode(), {name: handle}, limit)
        if moved.failed:
            raise WeightSyncError(moved.failed[name])
        ack = moved.done[name]
        if (ack.version, ack.digest) != (version, manifest.digest):
            raise WeightSyncError(f"receive: {name} acknowledged version {ack.version}, which is not what was sent")
        active = await call_one("activate", name, limit, lambda: handle.activate(version, limit))
        if active != version:
            raise WeightSyncError(f"activate: {name} reports version {active}")
