"""SenderEndpoint: connects an engine to the trainer's source of weights; FollowerEndpoint: the
trainer's other ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from typing import Protocol, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.endpoints.base import EngineEndpoint
from rl_ckpt_engine.endpoints.cast_dtype import cast_all, check_cast
from rl_ckpt_engine.endpoints.operations import Endpoint, operation
from rl_ckpt_engine.endpoints.weight_sinks import check_methods
from rl_ckpt_engine.engines.contract import CheckpointEngine, TensorSpec
from rl_ckpt_engine.payload.manifest import Manifest, WeightKind
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightSender


class DirectSender(Protocol):
    """`direct`: a source that writes its tensors into the engine's memory, which saves a copy."""

    def layout(self) -> Sequence[TensorSpec]:
        """All tensors, in order."""
        ...

    def write_weights(self, room: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Write the newest weights: the bytes of each tensor of the layout, in C order, into uint8
        [nbytes]."""
        ...


class SendAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Acknowledgment: a version is published."""

    manifest: bytes
    """The encoded Manifest."""
    metrics: dict[str, float] = {}
    """The engine's measurements of the send, by metric name."""


class SenderEndpoint(EngineEndpoint):
    """Connects an engine to a source of weights: the process that has the newest ones.

    Args:
        engine: used by this endpoint only and closed with it.
        source: read once per send. It writes the weights itself if source and engine declare
            `direct` and nothing is cast. The iterator is closed before `send` returns, so a
            context held open by it (such as adapters merged into the weights) covers exactly the
            reading.
        kind: `lora` if the source yields an adapter.
        must_change: refuse an adapter that equals the one sent before.
        dtype: cast floating-point tensors to this type (see `cast_dtype`); empty: no cast.

    Raises:
        ConfigError: the engine or the source lacks what it declares, or `dtype` is unknown.
    """

    def __init__(
        self,
        engine: CheckpointEngine,
        source: WeightSender,
        *,
        kind: WeightKind = "full",
        dtype: str = "",
        must_change: bool = True,
    ) -> None:
        super().__init__(engine)
        check_methods(source)
        check_cast(dtype)
        self._dtype = dtype
        self._source = source
        self._kind: WeightKind = kind
        self._must_change = must_change
        self._sent: Manifest | None = None
        self._committed: Manifest | None = None
        if engine.capabilities.elastic:
            engine.init_process_group(engine.build_topology(engine.prepare(), []).sender)

    @operation
    async def send(self, version: int, timeout_s: float) -> SendAck:
        """Publish the source's weights as `version`.

        Raises:
            WeightSyncError: see CheckpointEngine.send_weights; or the adapter did not change.
        """
        with closing(self._weights()) as weights:
            manifest = await self._engine.send_weights(weights, version, timeout_s=timeout_s, kind=self._kind)
        last = self._committed
        if self._kind == "lora" and self._must_change and last is not None and last.identity == manifest.identity:
            self._engine.abort()
            raise WeightSyncError(
                f"The adapter of version {version} equals that of version {last.version} bit for bit: it was not trained, or the source sends "
                "the wrong tensors. Check the parameters of the optimizer."
            )
        self._sent = manifest
        return SendAck(manifest=manifest.encode(), metrics=self._engine.send_metrics())

    def _weights(self) -> Generator[WeightTensor]:
        if self._dtype:
            return cast_all(_iterated(self._source.named_weights()), self._dtype)
        if not (self._engine.capabilities.direct and self._source.capabilities.direct):
            return _iterated(self._source.named_weights())
        source = cast("DirectSender", self._source)
        layout = source.layout()
        room = self._engine.room(layout)
        source.write_weights(room)
        return _iterated([WeightTensor(*spec, data) for spec, data in zip(layout, room, strict=True)])

    @operation
    async def serve(self, manifest: bytes, timeout_s: float) -> None:
        """Move a version that was sent through the process group, while all receivers are in
        `receive`."""
        await self._engine.serve(Manifest.decode(manifest), timeout_s=timeout_s)

    @operation
    async def finalize(self, version: int) -> None:
        """Commit `version`: no receiver in use needs an older one."""
        self._engine.finalize(version)
        if self._sent is not None and self._sent.version == version:
            self._committed = self._sent

    @operation
    async def abort(self) -> None:
        """Withdraw the version that was sent and not finalized."""
        if not self._closed:  # then nothing is published
            self._engine.abort()

    @operation
    async def republish(self, timeout_s: float) -> bytes:
        """Serve the full version committed last to late joiners; see CheckpointEngine.republish.

        Raises:
            WeightSyncError: there is none, or the engine has no cache.
        """
        return (await self._engine.republish(timeout_s=timeout_s)).encode()


SenderHandle: TypeAlias = SenderEndpoint
"""What the manager calls: an endpoint, or a `remote` handle of one."""


class FollowerEndpoint(Endpoint):
    """A rank of the trainer that holds a part of the weights, which another rank sends.

    Args:
        source: its iterator is a collective of all ranks.
    """

    def __init__(self, source: WeightSender) -> None:
        self._source = source

    @operation
    async def follow(self, timeout_s: float) -> None:
        """Take part in reading the weights, while the sender is in `send`."""
        del timeout_s  # the collective has its own
        for _ in self._source.named_weights():
            pass


def _iterated(weights: Iterable[WeightTensor]) -> Generator[WeightTensor]:
    """Iterate over the weights; closing this iterator closes the inner one.

    Raises:
        WeightSyncError: the source yields something else.
    """
    iterator = iter(weights)
    try:
        for weight in iterator:
            if not isinstance(weight, WeightTensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise WeightSyncError(
                    f"The source yielded a {type(weight).__name__} instead of a WeightTensor; of a name and a torch tensor, "
                    "rl_protocol.torch.to_weight makes one."
                )
            yield weight
    finally:
        if isinstance(iterator, Generator):
            iterator.close()
