"""The sender's memory as the receivers on its host see it: members, room for direct sources, views.

Receivers map /proc/<pid>/fd/<n> of the sender, whose slots are sealed (see memfd).
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.engines.base.memfd import Mapping, SealedSlot, SlotPlacement, complete_header, gone
from rl_ckpt_engine.engines.base.prefetch import Prefetch
from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.base.version_sender import VersionSender
from rl_ckpt_engine.engines.contract import TensorSpec
from rl_ckpt_engine.payload.block_stream import Deadline, Pacer, verify
from rl_ckpt_engine.payload.digests import blocks
from rl_ckpt_engine.payload.manifest import Manifest, decode_struct
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.host.shared_memory import memory_path
from rl_protocol.support.host_identity import this_host


class ShmMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    host: str
    """Boot id and pid namespace; equal exactly if processes see each other under /proc."""
    pid: int


_member_decoder = msgspec.msgpack.Decoder(ShmMember)
_placement_decoder = msgspec.msgpack.Decoder(SlotPlacement)


class SenderMemory:
    """A receiver's mappings of the sender's slots, kept between versions."""

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}

    def views(self, manifest: Manifest) -> list[WeightTensor]:
        """The tensors of the manifest in the sender's memory, not verified.

        Raises:
            WeightSyncError: the version is not there.
        """
        mapping = self._map(manifest)
        _check_header(mapping, manifest)
        return [
            WeightTensor(entry.name, entry.dtype, entry.shape, mapping.payload(entry.offset, entry.nbytes))
            for entry in manifest.tensors
        ]

    async def copy_written(self, buckets: Sequence[Bucket], prefetch: Prefetch) -> AsyncGenerator[None]:
        """Copy the buckets of a version that the sender still writes, as far as it has been
        written; hashes each block while it is in the cache."""
        pacer = Pacer(prefetch.deadline)
        for bucket in buckets:
            for start, block in blocks(bucket.memory):
                offset = bucket.start + start
                while (mapping := self._written(prefetch.version, offset + block.nbytes)) is None:
                    if not await prefetch.more():
                        return
                np.copyto(np.frombuffer(block, np.uint8), mapping.payload(offset, block.nbytes))
                bucket.verify(start + block.nbytes)
                await pacer.advance(block.nbytes)
            yield

    def _written(self, version: int, end: int) -> Mapping | None:
        """The mapping in which the version is written up to that byte; only memory that held an
        earlier version is mapped."""
        for mapping in self._mappings.values():
            if mapping.nbytes >= end and mapping.written(version) >= end:
                return mapping
        return None

    async def copy(
        self, manifest: Manifest, target: npt.NDArray[np.uint8], deadline: Deadline, skip: Collection[str] = ()
    ) -> float:
        """Copy the tensors of the manifest to their offsets in `target`, uint8 [payload_nbytes],
        except those of the names `skip`; returns the seconds it took.

        Raises:
            WeightSyncError: the version is not there or was withdrawn meanwhile, a tensor is
                damaged, or the deadline passed.
        """
        seconds = await verify(manifest, self.views(manifest), deadline, copy=target, skip=skip)
        self.require(manifest)
        return seconds

    def require(self, manifest: Manifest) -> None:
        """Check that the memory still holds the version whose `views` were returned.

        Raises:
            WeightSyncError: it does not.
        """
        self.watch(manifest)()

    def watch(self, manifest: Manifest) -> Callable[[], None]:
        """`require` for this version, even after the views of later ones were returned."""
        return partial(_check_header, self._mappings[_placement(manifest).fd], manifest)

    def clear(self) -> None:
        """Drop the mappings; views keep theirs."""
        self._mappings.clear()

    def _map(self, manifest: Manifest) -> Mapping:
        """The mapping of the sender's slot. The path is checked each time to detect a dead
        sender."""
        placement = _placement(manifest)
        pid = _member(manifest.sender).pid
        try:
            path = str(memory_path(pid, placement.fd))
            inode = Path(path).stat().st_ino
        except OSError as error:
            raise gone(str(error.filename or f"of process {pid}"), error) from error
        mapping = self._mappings.get(placement.fd)
        if mapping is None or mapping.inode != inode or mapping.nbytes < manifest.payload_nbytes:
            mapping = self._mappings[placement.fd] = Mapping(path, placement.inode, manifest.payload_nbytes)
        return mapping


class MapsSender:
    """Mixin of engines whose receivers map the sender's slots in a SenderMemory, which they
    create."""

    name: ClassVar[str]
    _sending: VersionSender[SealedSlot]
    _memory: SenderMemory

    def prepare(self) -> bytes:
        return msgspec.msgpack.encode(ShmMember(host=this_host(), pid=os.getpid()))

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        mine = _member(sender)
        for metadata in receivers:
            receiver = _member(metadata)
            if receiver.host != mine.host:
                raise WeightSyncError(
                    f"Engine {cls.name!r} works within one host and container; sender process {mine.pid} is on {mine.host}, receiver process "
                    f"{receiver.pid} on {receiver.host}. Place them together or set another CheckpointEngineConfig.backend."
                )

    def _forget_sender(self) -> None:
        self._memory.clear()

    def _new_store(self) -> SealedSlot:
        return SealedSlot()

    def _on_progress(self, store: SealedSlot, written: int) -> None:
        store.advance(written)

    def room(self, layout: Sequence[TensorSpec]) -> list[npt.NDArray[np.uint8]]:
        sending = self._sending
        sending.versions.require_idle("There is no memory for another version")
        if not sending.free:
            sending.free.append(SealedSlot())
        try:
            return sending.free[-1].room([spec.nbytes for spec in layout])  # send_weights takes the last one
        except OSError as error:
            raise WeightSyncError(f"There is no memory for {len(layout)} tensors: {error}.") from error


def _check_header(mapping: Mapping, manifest: Manifest) -> None:
    if mapping.header != complete_header(manifest):
        raise WeightSyncError(
            f"Version {manifest.version} is no longer available: the sender withdrew or overwrote it. A new sync is needed."
        )


def _member(metadata: bytes) -> ShmMember:
    return decode_struct(_member_decoder, metadata, "metadata of an engine for shared memory")


def _placement(manifest: Manifest) -> SlotPlacement:
    return decode_struct(_placement_decoder, manifest.placement, "placement of an engine for shared memory")
