"""A network link between two network namespaces whose packets arrive after a fixed time.

    python delayed_link.py FIRST SECOND SECONDS

It does what `tc qdisc add dev cable root netem delay` does at both ends of a cable, on kernels
without netem: both ends are TUN devices named `cable`, and this process carries the packets of each
direction, in order, each SECONDS after it was sent. It prints `ready`, and runs until it is killed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path

DEVICE = "cable"
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of sched.h."""
_SET_DEVICE = 0x400454CA
"""TUNSETIFF of linux/if_tun.h."""
_PACKETS = 0x0001 | 0x1000
"""IFF_TUN, packets of IP, and IFF_NO_PI, without a header before them."""
_LARGEST = 1 << 16
_AT_ONCE = 256
"""Packets of one direction that are read before those of the other are looked at."""


class Direction:
    """Packets that are on their way from one device to another.

    Args:
        source: file of the device at which they are sent.
        target: file of the device at which they arrive.
        delay_s: seconds between the two.
    """

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self._source, self._target, self._delay_s = source, target, delay_s
        self._on_the_way = deque[tuple[float, bytes]]()

    def receive(self) -> None:
        """Take the packets that were sent since the last call."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._source, _LARGEST)
            except BlockingIOError:
                return
            self._on_the_way.append((time.monotonic() + self._delay_s, packet))

    def deliver(self) -> float | None:
        """Hand over the packets whose time has come; returns the seconds until the next one's, None
        if there is none."""
        while self._on_the_way:
            due, packet = self._on_the_way[0]
            if (left := due - time.monotonic()) > 0:
                return left
            self._on_the_way.popleft()
            try:
                os.write(self._target, packet)
            except OSError as error:
                if error.errno != errno.EIO:  # the device is down: the packet is lost
                    raise
        return None


def open_device(namespace: str) -> int:
    """Make a TUN device in a network namespace; returns its file, which does not block.

    The device exists until the file is closed. This process stays in the namespace.
    """
    with Path("/run/netns", namespace).open("rb") as there:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _NEW_NETWORK):  # os.setns is new in Python 3.12
            raise OSError(ctypes.get_errno(), f"network namespace {namespace} can't be entered")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", DEVICE.encode(), _PACKETS))
    return device


def main() -> None:
    first, second, delay_s = sys.argv[1:]
    ends = [open_device(first), open_device(second)]
    directions = [Direction(a, b, float(delay_s)) for a, b in (ends, reversed(ends))]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        waits = [wait for direction in directions if (wait := direction.deliver()) is not None]
        select.select(ends, [], [], min(waits, default=None))
        for direction in directions:
            direction.receive()


if __name__ == "__main__":
    main()
