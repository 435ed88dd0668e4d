"""Anonymous shared memory (memfd) for one version of the weights; leaves no files behind.

    byte 0      header, 64 bytes: magic, version, state, sync_id, digest of the manifest, written
    byte 4096   payload

`written` is the number of bytes, from the start of the payload, that have their final value.

* The writer MUST set the header to WRITING before it changes the payload, and to COMPLETE
  afterwards.
* The memory MUST be sealed against shrinking, so a reader that maps it is never killed by SIGBUS.
* A reader MUST find the same COMPLETE header before it reads the payload and after its last use.
  It may copy the first `written` bytes earlier, and MUST then use only tensors of the copy whose
  digest is that of the manifest.
* Memory that readers map MUST be sealed against new writers before the header is COMPLETE. From
  then on only the writer's existing mapping can change it, and that one is read-only until the
  version is withdrawn. So the bytes that a reader uses are those it verified.

Elsewhere than on Linux the memory is a file of this user alone, without seals: processes of this
user could shrink or change it.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from contextlib import closing

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.payload.manifest import Manifest, aligned
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.fault_points import FaultPoint, reach
from rl_protocol.support.host.portable import uses_linux
from rl_protocol.support.host.shared_memory import allocate, close_memory, create_memory

PAYLOAD_START = 4096
_HEADER = struct.Struct("<8sQQ16s16sQ")
HEADER_BYTES = _HEADER.size
_MAGIC = b"RLCKPT\x00\x01"
_WRITING, _COMPLETE = 1, 2
_NO_VERSION = _HEADER.pack(_MAGIC, 0, _WRITING, bytes(16), bytes(16), 0)
_F_SEAL_FUTURE_WRITE = 0x10
"""Needs Linux 5.1. The module fcntl has it since Python 3.13."""


def complete_header(manifest: Manifest) -> bytes:
    """The header of memory that holds this manifest's complete payload."""
    return _HEADER.pack(_MAGIC, manifest.version, _COMPLETE, manifest.sync_id, manifest.digest, manifest.payload_nbytes)


class SlotPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Location of the payload within the sender's process."""

    fd: int
    inode: int


class Slot:
    """Sender side: memory for one version, reused and enlarged for later ones.

    Owns one file descriptor and one mapping.
    """

    unordered = True

    def __init__(self) -> None:
        self._fd = _memory()
        self._close = weakref.finalize(self, close_memory, self._fd)
        self._marked = False  # the header names a version
        self._progress = (-1, 0)
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._allocated = 0

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def placement(self) -> bytes:
        """Msgpack of SlotPlacement."""
        return msgspec.msgpack.encode(SlotPlacement(fd=self._fd, inode=os.fstat(self._fd).st_ino))

    def begin(self, version: int) -> None:
        """Withdraw the previous version; the payload may be overwritten from now on."""
        self.withdraw()
        self._progress = (version, 0)

    def advance(self, written: int) -> None:
        """Tell readers that this many bytes of the payload have their final value."""
        version, _ = self._progress
        self._progress = (version, written)
        self._marked = True
        self._write_header(_HEADER.pack(_MAGIC, version, _WRITING, bytes(16), bytes(16), written))

    def written(self, version: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """A part of that version's payload; None if it has not been written. Any thread may call
        this."""
        current, written = self._progress
        return self.payload(offset, nbytes) if current == version and offset + nbytes <= written else None

    def withdraw(self) -> None:
        """Mark the payload incomplete for readers."""
        self._progress = (-1, 0)
        if not self._marked:
            return
        self._marked = False
        self._write_header(_NO_VERSION)

    def room(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Writable memory for tensors of these sizes, at the offsets they will have in this order.

        Raises:
            OSError: there is not enough memory.
        """
        self.withdraw()
        starts = _starts(sizes)
        self._reserve(max((start + size for start, size in zip(starts, sizes, strict=True)), default=0))
        return [self._bytes[PAYLOAD_START + start :][:size] for start, size in zip(starts, sizes, strict=True)]

    def start(self, weight: WeightTensor, offset: int) -> bool:
        """Reserve memory for a tensor; returns whether it must be written, as it is not there yet.

        Raises:
            OSError: there is not enough memory.
            WeightSyncError: the tensor is in this memory at another offset, so copying it would
                overwrite others.
        """
        self._reserve(offset + weight.nbytes)
        if not np.may_share_memory(weight.data, self._bytes):  # compares addresses only
            return True
        in_place = address_of(weight.data) - address_of(self._bytes) == PAYLOAD_START + offset
        if weight.nbytes and not in_place:
            raise WeightSyncError(
                f"Tensor {weight.name!r} is in the memory of this version, but at the offset of another tensor. Send all tensors of the layout "
                "given to `room`, in its order."
            )
        return False

    def write(self, offset: int, piece: memoryview) -> None:
        """Copy a piece to its offset in the payload."""
        start = PAYLOAD_START + offset
        np.copyto(self._bytes[start : start + piece.nbytes], np.frombuffer(piece, np.uint8))

    def complete(self, manifest: Manifest) -> None:
        """Mark the payload complete."""
        self._reserve(manifest.payload_nbytes)
        self._progress = (manifest.version, manifest.payload_nbytes)
        self._marked = True
        self._write_header(complete_header(manifest))

    def _write_header(self, header: bytes) -> None:
        self._bytes[:HEADER_BYTES] = np.frombuffer(header, np.uint8)

    def _reserve(self, nbytes: int) -> None:
        """Allocate the memory of a payload in advance: touching unavailable memory would kill the
        process."""
        size = PAYLOAD_START + nbytes
        if size > self._bytes.nbytes:
            self._map(max(size, 2 * self._bytes.nbytes))
        if size > self._allocated:
            allocate(self._fd, self._allocated, size - self._allocated)
            self._allocated = size

    def _map(self, length: int) -> None:
        os.ftruncate(self._fd, length)  # allocates no memory
        self._bytes = np.frombuffer(mmap.mmap(self._fd, length), np.uint8)

    def payload(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """View of a part of the payload, which keeps the memory alive; None if there is no such
        part."""
        start = PAYLOAD_START + offset
        return self._bytes[start : start + nbytes] if start + nbytes <= self._bytes.nbytes else None

    def close(self) -> None:
        """Free the memory once no reader maps it; safe to call twice."""
        self._bytes = np.empty(0, np.uint8)
        self._close()


class SealedSlot(Slot):
    """A slot that readers may map: a published version can't be changed until it is withdrawn.

    The seal is permanent: only the mapping made before it is writable. If that mapping is too
    small, new memory replaces it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sealed = False
        self._lent: list[npt.NDArray[np.uint8]] = []

    def withdraw(self) -> None:
        """Mark the payload incomplete and make the memory writable again."""
        self._bytes.flags.writeable = True
        super().withdraw()

    def room(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Writable memory for tensors of these sizes; it becomes read-only when the version is
        published."""
        arrays = super().room(sizes)
        self._lent += arrays
        return arrays

    def complete(self, manifest: Manifest) -> None:
        """Seal the memory and mark the payload complete.

        Raises:
            OSError: the kernel does not support the seal (before Linux 5.1), or there is not enough
                memory.
        """
        self._reserve(manifest.payload_nbytes)
        first = manifest.tensors[0]
        reach(FaultPoint.WEIGHTS_SENT, self._bytes[PAYLOAD_START + first.offset :][: first.nbytes].data)
        for array in (*self._lent, self._bytes):
            array.flags.writeable = False
        self._lent = []
        if not self._sealed and uses_linux():
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            self._sealed = True
        super().complete(manifest)

    def _write_header(self, header: bytes) -> None:
        before, self._bytes.flags.writeable = self._bytes.flags.writeable, True
        super()._write_header(header)
        self._bytes.flags.writeable = before

    def _map(self, length: int) -> None:
        if not self._sealed:
            super()._map(length)
            return
        larger = SealedSlot()
        larger._reserve(length - PAYLOAD_START)
        larger._bytes[: self._bytes.nbytes] = self._bytes
        if self._marked:  # readers of the old memory wait for nothing
            self._write_header(_NO_VERSION)
        self._close()
        self._fd, self._bytes, self._allocated, self._sealed = larger._fd, larger._bytes, larger._allocated, False
        larger._close.detach()
        self._close = weakref.finalize(self, close_memory, self._fd)


class Mapping:
    """Receiver side: read-only mapping of a sender's slot, kept between versions.

    Args:
        path: /proc/<pid>/fd/<n> of the sender.
        inode: inode of the slot, which detects a reused file descriptor number.
        nbytes: size of the payload.

    Raises:
        WeightSyncError: the sender is gone, its memory is not readable, or it is not this slot.
    """

    def __init__(self, path: str, inode: int, nbytes: int) -> None:
        size = PAYLOAD_START + nbytes
        try:
            with closing(_OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC))) as owned:
                _check_file(owned.fd, path, inode, size)
                memory = mmap.mmap(owned.fd, size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise gone(path, error) from error
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self.inode = inode
        self.nbytes = nbytes

    @property
    def header(self) -> bytes:
        """The current header."""
        return self._bytes[: _HEADER.size].tobytes()

    def written(self, version: int) -> int:
        """How many bytes from the start of the payload have their final value in that version."""
        magic, current, _, _, _, written = _HEADER.unpack(self.header)
        return int(written) if (magic, current) == (_MAGIC, version) else 0

    def payload(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """View of a part of the payload; keeps the mapping alive."""
        start = PAYLOAD_START + offset
        return self._bytes[start : start + nbytes]


def gone(path: str, error: OSError) -> WeightSyncError:
    """The error for a sender's memory that can't be opened."""
    return WeightSyncError(
        f"The sender's memory {path} can't be opened ({error.strerror}): the sender died or closed, or runs as another user or "
        "in another container. A new sync is needed."
    )


def _memory() -> int:
    """Create memory that can't shrink; returns its file descriptor."""
    fd = create_memory("rl_ckpt_engine", sealing=True)
    if uses_linux():
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def _starts(sizes: Sequence[int]) -> list[int]:
    """Offsets of tensors of these sizes, as in rl_ckpt_engine.payload.manifest.plan."""
    ends = itertools.accumulate(sizes, lambda end, size: aligned(end) + size, initial=0)
    return [aligned(end) for end in ends][:-1]


def address_of(data: npt.NDArray[np.uint8]) -> int:
    """The address of the data in this process."""
    return int(data.__array_interface__["data"][0])


class _OwnedFd:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def _check_file(fd: int, path: str, inode: int, size: int) -> None:
    """Check inode, seals and size; raises OSError if the file is not a memfd, which has no
    seals."""
    status = os.fstat(fd)
    if status.st_ino != inode:
        raise WeightSyncError(
            f"{path} is no longer the memory of the manifest; the sender was replaced. A new sync is needed."
        )
    wanted = fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE
    if uses_linux() and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted != wanted:
        raise WeightSyncError(
            f"{path} is not sealed against shrinking and new writers, so this version of engine 'shm' did not create it. Run sender and "
            "receivers with the same version of rl-ckpt-engine."
        )
    if status.st_size < size:
        raise WeightSyncError(
            f"{path} holds {status.st_size} bytes; the manifest needs {size}. The send was interrupted."
        )
