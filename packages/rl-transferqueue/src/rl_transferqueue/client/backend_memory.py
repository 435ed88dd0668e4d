"""BackendMemory: the memory of a plane whose blocks lie in a backend's stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray
from rl_protocol.errors import PlaneLostError, PlaneTimeout
from rl_protocol.wire import Buffer, Header, encode, read_payload
from rl_transferqueue.backends import Backend, BlockStore, Share, block_key, load_backend
from rl_transferqueue.client.memory_interface import PlaneMemory, wait_through
from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.memory.build_batch import Groups, Piece, assemble
from rl_transferqueue.memory.receive_pool import ReceivePool
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.descriptor import PlaneDescriptor
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.spans import Span

T = TypeVar("T")

_THREADS = 4


class BackendMemory(PlaneMemory):
    """Memory in the stores of a backend, which are joined on first use, in the using thread."""

    def __init__(self, descriptor: PlaneDescriptor) -> None:
        self._descriptor = descriptor
        self._backend: Backend = load_backend(descriptor.backend)
        self._stores: dict[int, BlockStore] = {}
        self._lock = threading.Lock()
        self._buffers = ReceivePool()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rl-transferqueue-store")
        self._begun: set[Span] = set()
        """Spans that this client has put blocks to, committed or not."""
        self._closed = False

    def views(self, unit: int) -> bool:
        del unit
        return False

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        del span
        return np.frombuffer(self._buffers.take(nbytes), np.uint8)

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        await self.write(span, header, batch, timeout_s)

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        del header
        parts = encode(data)[1:]  # all but the header
        if not parts:
            return
        self._begun.add(span)
        await self._run(lambda: self._store(span.unit).put_block(block_key(span), parts), timeout_s)

    async def read(self, groups: Groups, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """Fetch every block once, as a whole."""

        def fetch() -> BatchData:
            payloads: dict[str, Buffer] = {}

            def view(piece: Piece) -> tuple[BatchData, range | Ints]:
                header, key = unpack_header(piece.header), block_key(piece.span)
                if key not in payloads:
                    payloads[key] = (
                        self._store(piece.span.unit).get_block(key, header.payload) if header.payload else b""
                    )
                return read_payload(header, payloads[key], piece.fields), piece.rows

            batch, fill, _ = assemble(groups, fields, view, self._buffers)
            fill()
            return batch

        try:
            return await self._run(fetch, timeout_s)
        finally:
            del anchor  # keeps the blocks until here

    def abandon(self, span: Span) -> bool:
        begun = span in self._begun
        self._begun.discard(span)
        return begun

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False)
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()

    def _store(self, unit: int) -> BlockStore:
        with self._lock:
            if self._closed:
                raise PlaneLostError("This client is closed; connect again.")
            if unit not in self._stores:
                plane = self._descriptor
                share = Share(plane.plane, unit, plane.units[unit].arena_bytes, plane.backend_address)
                self._stores[unit] = self._backend.join(share)
            return self._stores[unit]

    async def _run(self, work: Callable[[], T], timeout_s: float) -> T:
        if self._closed:
            raise PlaneLostError("This client is closed; connect again.")
        done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(done)
        except TimeoutError as error:
            await wait_through(done)  # the span must not be reused while the store writes to it
            raise PlaneTimeout(
                f"The backend {self._descriptor.backend!r} did not move all bytes within {timeout_s:g} s."
            ) from error
        except asyncio.CancelledError:
            await wait_through(done)
            raise
