"""Engine `shm`: the sender copies the weights once into memory that receivers on the same host map read-only.

The sender owns two slots (see memfd) and writes each version into the one that does not hold the version committed last. Receivers map
/proc/<pid>/fd/<n>, compare header and digests, and hand out views: one copy in all, however many receivers there are. A source that writes
its tensors straight into `room` saves that copy, too. A sink that computes with the views needs none of its own: what a receiver has active is
the version committed last, whose slot is written again only when all receivers in good standing have the next one active. Until then the
slot is sealed: what receivers have verified can't be changed before they use it, or while they do.
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

from rl_ckpt_engine.engine import Capabilities, DirectEngine, SharingEngine, TensorSpec
from rl_ckpt_engine.engines.base import PublishingEngine
from rl_ckpt_engine.engines.memfd import Mapping, SealedSlot, SlotPlacement, complete_header, gone
from rl_ckpt_engine.manifest import Manifest, decode_struct
from rl_ckpt_engine.stream import Deadline, verify
from rl_protocol.errors import WeightSyncError
from rl_protocol.hosts import this_host
from rl_protocol.weights import WeightTensor


class ShmMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    host: str
    """Boot id of the kernel and name of the pid namespace: equal if and only if processes see each other under /proc."""
    pid: int


_member_decoder = msgspec.msgpack.Decoder(ShmMember)
_placement_decoder = msgspec.msgpack.Decoder(SlotPlacement)


class ShmEngine(PublishingEngine[SealedSlot], DirectEngine, SharingEngine):
    """See the module's docstring. A sender's memory is that of its two largest versions, kept until `close`."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=True, elastic=True, devices=("cpu",)
    )

    def __init__(self) -> None:
        super().__init__()
        self._me = ShmMember(host=this_host(), pid=os.getpid())
        self._mappings: dict[int, Mapping] = {}

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return msgspec.msgpack.encode(self._me)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        mine = _member(sender)
        for metadata in receivers:
            receiver = _member(metadata)
            if receiver.host != mine.host:
                raise WeightSyncError(
                    f"Engine 'shm' works within one host and container; sender process {mine.pid} is on {mine.host}, receiver process "
                    f"{receiver.pid} on {receiver.host}. Place them together or set another checkpoint_engine.backend."
                )

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        if member != self._sender:
            self._mappings.clear()
        super().init_process_group(member)

    def _new_place(self) -> SealedSlot:
        return SealedSlot()

    def room(self, layout: Sequence[TensorSpec]) -> list[npt.NDArray[np.uint8]]:
        """See DirectEngine.room."""
        self._ledger.require_idle("There is no room for another version")
        if not self._free:
            self._free.append(self._new_place())
        try:
            return self._free[-1].room([spec.nbytes for spec in layout])  # send_weights takes the last one
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
        """See SharingEngine.watch."""
        self.confirm(manifest)
        return partial(_check_header, self._mappings[_placement(manifest).fd], manifest)

    def close(self) -> None:
        """See CheckpointEngine.close."""
        super().close()
        self._mappings.clear()

    def _map(self, manifest: Manifest) -> Mapping:
        """The sender's slot; it is looked up anew each time, so that a sender which died is noticed."""
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
            f"Version {manifest.version} is not there any more: the sender took it back or wrote a later version over it. "
            "A new sync is needed."
        )


def _member(metadata: bytes) -> ShmMember:
    return decode_struct(_member_decoder, metadata, "metadata of an engine 'shm'")


def _placement(manifest: Manifest) -> SlotPlacement:
    return decode_struct(_placement_decoder, manifest.placement, "placement of an engine 'shm'")
