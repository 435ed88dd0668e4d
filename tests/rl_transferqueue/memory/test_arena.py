"""Mappings of shared memory."""

from __future__ import annotations

import os

from rl_protocol.support.host.shared_memory import close_memory, create_memory
from rl_transferqueue.memory.arena import map_memory
from rl_transferqueue.wire.process_liveness import this_process


def new_memory(number: int) -> None:
    """Make memory of 4,096 bytes with this file descriptor."""
    fd = create_memory("test")
    os.ftruncate(fd, 4096)
    if fd != number:
        os.dup2(fd, number, inheritable=False)
        os.close(fd)


def test_memory_that_has_the_number_of_earlier_memory_is_mapped_itself() -> None:
    """Servers that are threads of this process end, and later ones take their numbers."""
    number = create_memory("test")
    os.ftruncate(number, 4096)
    first = map_memory(this_process(), number, 4096, writable=True)
    first[:5] = b"first"
    assert map_memory(this_process(), number, 4096, writable=True) is first

    close_memory(number)
    new_memory(number)
    second = map_memory(this_process(), number, 4096, writable=True)
    second[:6] = b"second"
    assert map_memory(this_process(), number, 4096, writable=False)[:6] == b"second"
    assert first[:5] == b"first"
    close_memory(number)
