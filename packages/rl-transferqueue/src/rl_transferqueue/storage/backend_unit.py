"""The unit process that hosts a store of a backend."""

from __future__ import annotations

from collections.abc import Callable

from rl_protocol.errors import WireError
from rl_transferqueue.backends import Share, block_key, load_backend
from rl_transferqueue.transport.addresses import Endpoints, endpoint
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.control_server import Caller, Server
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.messages import CONTROLLER, Done, Fence, Free, Populate


class BackendUnit:
    """Hosts a store of a backend. Clients put and get the blocks; the unit only frees them."""

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
        """No descriptor, as there is nothing to map, and the bytes of the store."""
        return -1, self._capacity

    def listen(self, host: str, key: PlaneKey, port: int = 0) -> Endpoints:
        """Also listen for clients of other hosts, which watch the unit through a connection."""
        self._bulk = BulkServer(self.reactor, host, key, port=port)
        return Endpoints(bulk=endpoint(host, self._bulk.port))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back at once: the unit is ready."""
        callback()

    def close(self) -> None:
        """Close the sockets and the store."""
        self.server.close()
        if self._bulk is not None:
            self._bulk.close()
        self._store.close()

    def _populate(self, caller: Caller, message: Populate) -> None:
        """Nothing to do: the store manages its memory."""

    def _fence(self, caller: Caller, message: Fence) -> Done:
        return self._free(caller, Free(message.spans))

    def _free(self, caller: Caller, message: Free) -> Done:
        if caller.session != CONTROLLER:
            raise WireError("Only the controller may say this to a storage unit.")
        self._store.free([block_key(span) for span in message.spans])
        return Done()
