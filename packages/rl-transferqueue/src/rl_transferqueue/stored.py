"""A plane whose blocks lie in a backend's stores: the client's way to them, and the unit process that hosts one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from rl_protocol.batch import BatchData
from rl_protocol.columns import AnyArray
from rl_protocol.errors import PlaneLostError, PlaneTimeout, WireError
from rl_protocol.wire import Buffer, Header, encode, read_payload
from rl_transferqueue.backends import Backend, BlockStore, Share, load_backend
from rl_transferqueue.buffers import WarmBuffers
from rl_transferqueue.bulk_server import BulkServer
from rl_transferqueue.descriptor import PlaneDescriptor
from rl_transferqueue.header_cache import unpack_header
from rl_transferqueue.hosts import Endpoints, endpoint
from rl_transferqueue.keys import PlaneKey
from rl_transferqueue.leases import Anchor
from rl_transferqueue.messages import CONTROLLER, Done, Fence, Free, Located, Populate, Span
from rl_transferqueue.reactor import Reactor
from rl_transferqueue.reader import Piece, assemble, pieces_of
from rl_transferqueue.server import Caller, Server
from rl_transferqueue.table import Ints

T = TypeVar("T")

_THREADS = 4


def block_key(span: Span) -> str:
    """Name of the block that lies at the beginning of a span: nobody else's until the controller gives the span anew."""
    return f"{span.unit}-{span.offset}"


class StoredMemory:
    """See PlaneMemory. Stores are joined when first needed, in the thread that needs them."""

    def __init__(self, descriptor: PlaneDescriptor) -> None:
        self._descriptor = descriptor
        self._backend: Backend = load_backend(descriptor.backend)
        self._stores: dict[int, BlockStore] = {}
        self._lock = threading.Lock()
        self._buffers = WarmBuffers()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rl-transferqueue-store")
        self._begun: set[Span] = set()
        """Places this client has put blocks to, committed or not."""
        self._closed = False

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        """See PlaneMemory.draft."""
        del span
        return np.frombuffer(self._buffers.take(nbytes), np.uint8)

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        """See PlaneMemory.finish."""
        await self.write(span, header, batch, timeout_s)

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        """See PlaneMemory.write."""
        del header
        parts = encode(data)[1:]  # all but the header
        if not parts:
            return
        self._begun.add(span)
        await self._run(lambda: self._store(span.unit).put_block(block_key(span), parts), timeout_s)

    async def read(self, located: Located, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """See PlaneMemory.read. Every block is fetched once, whole."""
        groups = pieces_of(located, fields)

        def fetch() -> BatchData:
            payloads: dict[str, Buffer] = {}

            def view(piece: Piece) -> tuple[BatchData, range | Ints]:
                header, key = unpack_header(piece.header), block_key(piece.span)
                if key not in payloads:
                    payloads[key] = (
                        self._store(piece.span.unit).get_block(key, header.payload) if header.payload else b""
                    )
                return read_payload(header, payloads[key], piece.fields), piece.rows

            batch, fill, _ = assemble(groups, fields, view)
            fill()
            return batch

        try:
            return await self._run(fetch, timeout_s)
        finally:
            del anchor  # until here the blocks had to stay

    def abandon(self, span: Span) -> bool:
        """See PlaneMemory.abandon."""
        begun = span in self._begun
        self._begun.discard(span)
        return begun

    def close(self) -> None:
        """See PlaneMemory.close."""
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
                told = self._descriptor
                share = Share(told.plane, unit, told.units[unit].arena_bytes, told.backend_address)
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
            await asyncio.wait((done,))  # nobody may get the block's place while the store writes it
            raise PlaneTimeout(
                f"The backend {self._descriptor.backend!r} did not move all bytes within {timeout_s:g} s."
            ) from error
        except asyncio.CancelledError:
            await asyncio.wait((done,))
            raise


class StoreUnit:
    """The process that hosts the store of one unit. The blocks are put and got by clients; here they are only freed."""

    def __init__(self, address: str, backend: str, share: Share) -> None:
        self.reactor = Reactor()
        self._store = load_backend(backend).host(share)
        self._capacity = share.nbytes
        self._bulk: BulkServer | None = None
        self.server = Server(
            self.reactor,
            address,
            {Populate: self._populate, Fence: self._fence, Free: self._free},
        )

    @property
    def shared_memory(self) -> tuple[int, int]:
        """There is none to map; the bytes are those of the store."""
        return -1, self._capacity

    def listen(self, host: str, key: PlaneKey, port: int = 0) -> Endpoints:
        """Also serve clients of other hosts: they see here that the unit lives."""
        self._bulk = BulkServer(self.reactor, host, key, port=port)
        return Endpoints(bulk=endpoint(host, self._bulk.port))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back once it serves, which is now."""
        callback()

    def close(self) -> None:
        """Close the sockets and the store."""
        self.server.close()
        if self._bulk is not None:
            self._bulk.close()
        self._store.close()

    def _populate(self, caller: Caller, message: Populate) -> None:
        """The store has its own ways."""

    def _fence(self, caller: Caller, message: Fence) -> Done:
        return self._free(caller, Free(message.spans))

    def _free(self, caller: Caller, message: Free) -> Done:
        if caller.session != CONTROLLER:
            raise WireError("Only the controller may say this to a storage unit.")
        self._store.free([block_key(span) for span in message.spans])
        return Done()
