"""Engine `shm`: receivers on the same host map the memory of the sender read-only.

The sender copies the weights once. It owns two slots (see shared_memory) and writes each version
into the one that does not hold the version committed last. Receivers map /proc/<pid>/fd/<n>,
compare header and digests, and return views: one copy for any number of receivers. A source that
writes its tensors into `room` saves this copy, too.

A sink may compute with the views. Its active version is the one committed last, whose slot is
sealed and is reused only after all receivers in use have activated the next version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import Mapping, SealedSlot, SlotPlacement, complete_header, gone
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.contract import Capabilities, TensorSpec
from rl_ckpt_engine.payload.block_stream import Deadline, verify
from rl_ckpt_engine.payload.manifest import Manifest, decode_struct
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.host_identity import this_host


class ShmMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    host: str
    """Boot id and pid namespace; equal exactly if processes see each other under /proc."""
    pid: int


_member_decoder = msgspec.msgpack.Decoder(ShmMember)
_placement_decoder = msgspec.msgpack.Decoder(SlotPlacement)


class ShmEngine(PublishingEngine[SealedSlot]):
    """Shared memory between processes of one host; a sender keeps two slots until `close`."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True,
        zero_copy=True,
        elastic=True,
        devices=("cpu",),
        caches=True,
        direct=True,
        shares=True,
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._me = ShmMember(host=this_host(), pid=os.getpid())
        self._mappings: dict[int, Mapping] = {}

    def prepare(self) -> bytes:
        return msgspec.msgpack.encode(self._me)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        mine = _member(sender)
        for metadata in receivers:
            receiver = _member(metadata)
            if receiver.host != mine.host:
                raise WeightSyncError(
                    f"Engine 'shm' works within one host and container; sender process {mine.pid} is on {mine.host}, receiver process "
                    f"{receiver.pid} on {receiver.host}. Place them together or set another CheckpointEngineConfig.backend."
                )

    def _forget_sender(self) -> None:
        self._mappings.clear()

    def _new_store(self) -> SealedSlot:
        return SealedSlot()

    def room(self, layout: Sequence[TensorSpec]) -> list[npt.NDArray[np.uint8]]:
        self._sending.versions.require_idle("There is no memory for another version")
        if not self._sending.free:
            self._sending.free.append(self._new_store())
        try:
            return self._sending.free[-1].room([spec.nbytes for spec in layout])  # send_weights takes the last one
        except OSError as error:
            raise WeightSyncError(f"There is no memory for {len(layout)} tensors (engine 'shm'): {error}.") from error

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        mapping = self._map(manifest)
        _check_header(mapping, manifest)
        weights = [
            WeightTensor(entry.name, entry.dtype, entry.shape, mapping.payload(entry.offset, entry.nbytes))
            for entry in manifest.tensors
        ]
        self.verify_seconds = await verify(manifest, weights, deadline)
        return weights

    def _require_there(self, manifest: Manifest) -> None:
        _check_header(self._mappings[_placement(manifest).fd], manifest)

    def watch(self, manifest: Manifest) -> Callable[[], None]:
        self.confirm(manifest)
        return partial(_check_header, self._mappings[_placement(manifest).fd], manifest)

    def close(self) -> None:
        super().close()
        self._mappings.clear()

    def _map(self, manifest: Manifest) -> Mapping:
        """The mapping of the sender's slot. The path is checked each time to detect a dead
        sender."""
        placement = _placement(manifest)
        path = f"/proc/{_member(manifest.sender).pid}/fd/{placement.fd}"
        try:
            inode = Path(path).stat().st_ino
        except OSError as error:
            raise gone(path, error) from error
        mapping = self._mappings.get(placement.fd)
        if mapping is None or mapping.inode != inode or mapping.nbytes < manifest.payload_nbytes:
            mapping = self._mappings[placement.fd] = Mapping(path, placement.inode, manifest.payload_nbytes)
        return mapping


def _check_header(mapping: Mapping, manifest: Manifest) -> None:
    if mapping.header != complete_header(manifest):
        raise WeightSyncError(
            f"Version {manifest.version} is no longer available: the sender withdrew or overwrote it. A new sync is needed."
        )


def _member(metadata: bytes) -> ShmMember:
    return decode_struct(_member_decoder, metadata, "metadata of an engine 'shm'")


def _placement(manifest: Manifest) -> SlotPlacement:
    return decode_struct(_placement_decoder, manifest.placement, "placement of an engine 'shm'")
