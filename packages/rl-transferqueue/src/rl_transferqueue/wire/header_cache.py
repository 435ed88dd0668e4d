"""A bounded cache of values computed from the packed headers of blocks."""

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
"""Bytes of a decoded header and its key per packed byte; 12 to 14 were measured."""
_decoder = msgspec.msgpack.Decoder(Header)


class HeaderCache(Generic[V]):
    """Caches a function of packed headers; safe to call from several threads.

    The cache has two halves. New results go to the new half; a result of the old half moves to the
    new one when it is used. When the new half is full it becomes the old one, whose results are
    dropped. A result larger than a half is not kept, and none while another thread keeps one: no
    caller waits, as a forked process may find the lock taken for ever.
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
        if nbytes <= self._most_bytes and self._lock.acquire(blocking=False):
            try:
                self._keep(packed, value, nbytes)
            finally:
                self._lock.release()
        return value

    def _keep(self, packed: bytes, value: V, nbytes: int) -> None:
        if packed in self._new:
            return
        if self._new_bytes + nbytes > self._most_bytes:
            self._new, self._old, self._new_bytes = {}, self._new, 0
        self._old.pop(packed, None)
        self._new[packed] = value
        self._new_bytes += nbytes


unpack_header = HeaderCache[Header](_decoder.decode)
"""The header of a block from its msgpack; raises what msgspec raises."""
