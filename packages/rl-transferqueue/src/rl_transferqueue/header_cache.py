"""What was made from the packed headers of blocks, kept for the next block with an equal header, within a bound in bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from rl_protocol.wire import Header

V = TypeVar("V")

MOST_BYTES = 8 << 20
"""Bytes that one cache may take, estimated."""
_PER_PACKED_BYTE = 16
"""Bytes that a decoded header and its key take per packed byte; 12 to 14 were measured for 1 to 1500 columns."""
_decoder = msgspec.msgpack.Decoder(Header)


class HeaderCache(Generic[V]):
    """A function of packed headers that remembers its results; safe to call from several threads.

    There are two generations of half the size: a result that is used while it is in the old one moves to the new one, and the old one is
    dropped when the new one is full. A result that is larger than a generation is not kept.
    """

    def __init__(self, make: Callable[[bytes], V], most_bytes: int = MOST_BYTES) -> None:
        self._make = make
        self._most_bytes = most_bytes // 2
        self._new: dict[bytes, V] = {}
        self._old: dict[bytes, V] = {}
        self._new_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, packed: bytes) -> V:
        found = self._new.get(packed)
        return self._look_further(packed) if found is None else found

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def _look_further(self, packed: bytes) -> V:
        value = self._old.get(packed)
        if value is None:
            value = self._make(packed)
        nbytes = _PER_PACKED_BYTE * (len(packed) + _PER_PACKED_BYTE)
        with self._lock:
            if nbytes <= self._most_bytes and packed not in self._new:
                if self._new_bytes + nbytes > self._most_bytes:
                    self._new, self._old, self._new_bytes = {}, self._new, 0
                self._old.pop(packed, None)
                self._new[packed] = value
                self._new_bytes += nbytes
        return value


unpack_header = HeaderCache[Header](_decoder.decode)
"""The header of a block from its msgpack; raises what msgspec raises."""
