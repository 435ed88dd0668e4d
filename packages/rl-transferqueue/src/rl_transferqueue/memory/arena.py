"""The shared memory of one storage unit (`rl_protocol.support.host.shared_memory`).

On Linux it is an anonymous file (memfd), which has no name in a file system, so none is left behind
when a process is killed, and the size of /dev/shm does not matter. A client on the same host maps
it by pid and number. Its pages exist once they are touched.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

from rl_protocol.errors import DataPlaneError, PlaneLostError
from rl_protocol.support.host.shared_memory import create_memory, memory_path
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.process_liveness import ProcessId

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since 5.14
_CHUNK = 4 << 20


class Arena:
    """The unit's mapping of its memory.

    Lifecycle: created with its final size; pages are touched by `populate` or on first write; ends
    with the process.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = create_memory("rl-transferqueue")
        os.ftruncate(self.fd, nbytes)
        self.memory = mmap.mmap(self.fd, nbytes)

    def replaced(self) -> Arena:
        """A new, empty arena. Processes that have mapped this one may use their mappings on; the
        memory is free once none is left. Its number is not used again, so that no process maps
        another arena by it."""
        new = Arena(len(self.memory))
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, self.fd, inheritable=False)
        os.close(nothing)
        return new

    def populate(self, start: int, nbytes: int) -> bool:
        """Touch pages ahead of need; False: the kernel can't do that, pages are touched on first
        write."""
        try:
            self.memory.madvise(_MADV_POPULATE_WRITE, start, nbytes)
        except OSError:
            return False
        return True


class EnteredPages:
    """Tracks which parts of a mapping are in this process's page tables.

    The unit touches memory ahead of need, but each process that writes to it takes a page fault per
    page on first use. One call that enters many pages costs a quarter of that.
    """

    def __init__(self) -> None:
        self._chunks: set[int] = set()

    def enter(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """Enter the pages of a range that is about to be written; small ranges are left to page
        faults."""
        for chunk in range(-(-start // _CHUNK), (start + nbytes) // _CHUNK):
            if chunk not in self._chunks:
                self._chunks.add(chunk)
                with contextlib.suppress(OSError):  # an older kernel: pages come in on first write
                    mapping.madvise(_MADV_POPULATE_READ, chunk * _CHUNK, _CHUNK)


_mappings: weakref.WeakValueDictionary[tuple[int, int, bool], mmap.mmap] = weakref.WeakValueDictionary()
"""Device and inode of the memory, and whether it is writable -> its mapping.

File descriptors would not do: a plane in this process that follows another one can have memory of
the same number, while rows of the first are still read.
"""


def map_arena(unit: UnitAddress, *, writable: bool) -> mmap.mmap:
    """Map the arena of a unit, as `map_memory` does."""
    return map_memory(unit.process, unit.arena_fd, unit.arena_bytes, writable=writable)


def map_memory(process: ProcessId, number: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    """Map the anonymous memory of a server process; callers in this process share one mapping.

    Args:
        process: the owner of the memory.
        number: the memory's file descriptor in that process.
        nbytes: its size.
        writable: whether it will be written to.

    Raises:
        PlaneLostError: the process is gone.
        DataPlaneError: this process may not open its memory.
    """
    try:
        path = memory_path(process.pid, number)
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PlaneLostError(f"The process of the data plane with pid {process.pid} is gone: {error}.") from error
    except PermissionError as error:
        raise DataPlaneError(
            f"The memory of the data plane's process {process.pid} can't be opened: {error}. Clients must run as the user that "
            "started the plane, in the same pid namespace."
        ) from error
    try:
        memory = os.fstat(fd)
        key = (memory.st_dev, memory.st_ino, writable)
        mapping = _mappings.get(key)
        if mapping is None:
            mapping = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
            _mappings[key] = mapping
    except (ValueError, OSError) as error:
        raise DataPlaneError(f"{path} can't be mapped with {nbytes} bytes: {error}.") from error
    finally:
        os.close(fd)
    return mapping
