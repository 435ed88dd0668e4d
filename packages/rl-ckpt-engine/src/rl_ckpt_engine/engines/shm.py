"""Engine `shm`: the sender copies the weights once into memory that receivers on the same host map read-only.

The sender owns two slots (see memfd) and writes each version into the one that does not hold the version committed last. Receivers map
/proc/<pid>/fd/<n>, compare header and digests, and hand out views: one copy in all, however many receivers there are.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from rl_ckpt_engine.engine import Capabilities, CheckpointEngine, Topology
from rl_ckpt_engine.engines.memfd import Mapping, Slot, complete_header, gone
from rl_ckpt_engine.ledger import Published, SendLedger
from rl_ckpt_engine.manifest import DIGEST_BYTES, Manifest, decode_struct, payload_size
from rl_ckpt_engine.stream import Deadline, emit, verify
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor


class ShmMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    host: str
    """Boot id of the kernel and name of the pid namespace: equal if and only if processes see each other under /proc."""
    pid: int


class ShmPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the payload is, within the sender."""

    fd: int
    inode: int


_encode = msgspec.msgpack.encode
_member_decoder = msgspec.msgpack.Decoder(ShmMember)
_placement_decoder = msgspec.msgpack.Decoder(ShmPlacement)


class ShmEngine(CheckpointEngine):
    """See the module's docstring. A sender's memory is that of its two largest versions, kept until `close`."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=True, elastic=True, devices=("cpu",)
    )

    def __init__(self) -> None:
        self._me = ShmMember(host=_host(), pid=os.getpid())
        self._sender: ShmMember | None = None
        self._ledger: SendLedger[Slot] = SendLedger()
        self._free: list[Slot] = []
        self._running: Deadline | None = None
        self._mappings: dict[int, Mapping] = {}

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return _encode(self._me)

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """See CheckpointEngine.build_topology."""
        sender = _member(sender_metadata)
        for metadata in receiver_metadatas:
            receiver = _member(metadata)
            if receiver.host != sender.host:
                raise WeightSyncError(
                    f"Engine 'shm' works within one host and container; sender process {sender.pid} is on {sender.host}, receiver process "
                    f"{receiver.pid} on {receiver.host}. Place them together or set another checkpoint_engine.backend."
                )
        return Topology(sender=sender_metadata, receivers=(sender_metadata,) * len(receiver_metadatas))

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        sender = _member(member)
        if sender != self._sender:
            self._mappings.clear()
        self._sender = sender

    async def send_weights(self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float) -> Manifest:
        """See CheckpointEngine.send_weights."""
        self._ledger.begin(version)
        slot = None
        try:
            self._running = Deadline(timeout_s, f"Sending version {version}", "engine shm")
            slot = self._free.pop() if self._free else Slot()
            manifest = await self._fill(slot, weights, version, self._running)
            self._ledger.publish(Published(version, manifest.sync_id, slot))
            slot = None
            return manifest
        except OSError as error:
            raise WeightSyncError(
                f"Sending version {version} (engine shm) failed: {error}. Is there memory left?"
            ) from error
        finally:
            if slot is not None:
                self._free.append(slot)
            self._ledger.cancel()
            self._running = None

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """See CheckpointEngine.receive_weights."""
        deadline = Deadline(timeout_s, f"Receiving version {manifest.version}", f"process {os.getpid()}, engine shm")
        mapping = self._map(manifest)
        self._check_header(mapping, manifest)
        weights = [
            WeightTensor(entry.name, entry.dtype, entry.shape, mapping.payload(entry.offset, entry.nbytes))
            for entry in manifest.tensors
        ]
        await verify(manifest, weights, deadline)
        self._check_header(mapping, manifest)
        return weights

    def confirm(self, manifest: Manifest) -> None:
        """See CheckpointEngine.confirm."""
        mapping = self._mappings.get(_placement(manifest.placement).fd)
        if mapping is None:
            raise WeightSyncError(f"Version {manifest.version} was not received here; nothing can be confirmed.")
        self._check_header(mapping, manifest)

    def finalize(self, version: int) -> None:
        """See CheckpointEngine.finalize."""
        former = self._ledger.finalize(version)
        if former is not None:
            self._free.append(former.held)

    def abort(self) -> None:
        """See CheckpointEngine.abort."""
        if self._running is not None:
            self._running.cancel("abort() was called")
        taken = self._ledger.abort()
        if taken is not None:
            taken.held.open_for_writing()
            self._free.append(taken.held)

    def close(self) -> None:
        """See CheckpointEngine.close."""
        self.abort()
        if self._ledger.committed is not None:
            self._free.append(self._ledger.committed.held)
            self._ledger.committed = None
        for slot in self._free:
            slot.close()
        self._free.clear()
        self._mappings.clear()

    async def _fill(self, slot: Slot, weights: Iterable[WeightTensor], version: int, deadline: Deadline) -> Manifest:
        slot.open_for_writing()
        entries = await emit(weights, slot.write, deadline)
        manifest = Manifest(
            version=version,
            sync_id=secrets.token_bytes(DIGEST_BYTES),
            engine=self.name,
            tensors=entries,
            payload_nbytes=payload_size(entries),
            sender=self.prepare(),
            placement=_encode(ShmPlacement(fd=slot.fd, inode=slot.inode)),
        ).sealed()
        slot.complete(manifest)
        return manifest

    def _map(self, manifest: Manifest) -> Mapping:
        """The sender's slot; it is looked up anew each time, so that a sender which died is noticed."""
        if self._sender is None or manifest.sender != _encode(self._sender):
            raise WeightSyncError(
                "The manifest comes from a sender this receiver has not joined; call init_process_group."
            )
        placement = _placement(manifest.placement)
        path = f"/proc/{self._sender.pid}/fd/{placement.fd}"
        try:
            inode = Path(path).stat().st_ino
        except OSError as error:
            raise gone(path, error) from error
        mapping = self._mappings.get(placement.fd)
        if mapping is None or mapping.inode != inode or mapping.nbytes < manifest.payload_nbytes:
            mapping = self._mappings[placement.fd] = Mapping(path, placement.inode, manifest.payload_nbytes)
        return mapping

    @staticmethod
    def _check_header(mapping: Mapping, manifest: Manifest) -> None:
        if mapping.header != complete_header(manifest):
            raise WeightSyncError(
                f"Version {manifest.version} is not there any more: the sender took it back or wrote a later version over it. "
                "A new sync is needed."
            )


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _member(metadata: bytes) -> ShmMember:
    return decode_struct(_member_decoder, metadata, "metadata of an engine 'shm'")


def _placement(data: bytes) -> ShmPlacement:
    return decode_struct(_placement_decoder, data, "placement of an engine 'shm'")
