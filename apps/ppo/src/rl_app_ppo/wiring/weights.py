"""The handles through which the CheckpointEngineManager on the driver reaches the worker processes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rl_app_ppo.runtime.messages import WeightCall
from rl_ckpt_engine import ReceiveAck, ReceiverEndpoint, SenderEndpoint
from rl_protocol.ports import WeightSender
from rl_trainer import WorkerHandle
from rl_trainer.dispatch import together

MARGIN_S = 5.0  # the worker's own deadline passes first, so that its message, which knows more, is the one that is seen


class FollowingSender:
    """The end of a rank that sends nothing: it takes part in putting sharded weights together, which the first rank sends."""

    def __init__(self, source: WeightSender) -> None:
        self._source = source

    def follow(self) -> None:
        """Go through all weights, at the same time as the first rank."""
        for _ in self._source.named_weights():
            pass


WeightEnd = SenderEndpoint | FollowingSender | ReceiverEndpoint
"""What a worker process may have of the weight synchronisation."""


class RemoteSender:
    """SenderHandle over the processes that share the policy: the first one sends, the others help to put its weights together."""

    def __init__(self, ranks: Sequence[WorkerHandle]) -> None:
        self._first, *self._others = ranks

    async def send(self, version: int, timeout_s: float) -> bytes:
        """Pack the weights as `version`; returns the manifest."""
        message = WeightCall(version=version, timeout_s=timeout_s)
        others = (_call(rank, "follow", message) for rank in self._others)
        manifest, *_ = await together(_call(self._first, "send", message), *others)
        return manifest

    async def finalize(self, version: int) -> None:
        """Everybody has the version: its buffers may be used again."""
        await _call(self._first, "finalize", WeightCall(version=version))

    async def abort(self) -> None:
        """Give the sync up."""
        await _call(self._first, "abort", WeightCall())


class RemoteReceiver:
    """ReceiverHandle over a worker process."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self._worker.name

    async def pause(self, timeout_s: float) -> None:
        """Stop admitting requests."""
        await _call(self._worker, "pause", WeightCall(timeout_s=timeout_s))

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        """Fetch and verify into staging."""
        answer = await _call(self._worker, "receive", WeightCall(manifest=manifest, timeout_s=timeout_s))
        return msgspec.msgpack.decode(answer, type=ReceiveAck)

    async def activate(self, version: int, timeout_s: float) -> int:
        """Generate with the staged weights from now on; returns the version that is active then."""
        answer = await _call(self._worker, "activate", WeightCall(version=version, timeout_s=timeout_s))
        return msgspec.msgpack.decode(answer, type=int)

    async def resume(self, timeout_s: float) -> None:
        """Admit requests again."""
        await _call(self._worker, "resume", WeightCall(timeout_s=timeout_s))


async def _call(worker: WorkerHandle, method: str, call: WeightCall) -> bytes:
    return await worker.call(f"weights.{method}", msgspec.msgpack.encode(call), timeout_s=call.timeout_s + MARGIN_S)
