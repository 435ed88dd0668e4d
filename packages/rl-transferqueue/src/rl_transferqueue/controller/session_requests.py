"""Requests about sessions, and the ends of sessions: goodbye, a lost connection, a dead process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_protocol.errors import WireError
from rl_transferqueue.controller.block_cleanup import BlockCleanup
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import MemoryRequests
from rl_transferqueue.controller.row_requests import RowRequests
from rl_transferqueue.controller.rows.block_table import BlockTable
from rl_transferqueue.controller.sessions import Sessions
from rl_transferqueue.controller.unacknowledged import Taken, TakenRows
from rl_transferqueue.transport.bulk_protocol import hang_up
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.control_server import Caller, Handler
from rl_transferqueue.wire.messages import Bye, Cancel, Done, Hello, ReleaseLeases
from rl_transferqueue.wire.process_liveness import ProcessId, open_pidfd


class SessionRequests:
    """Opens sessions and ends them.

    A client on this host is watched through a pidfd, a client on another host through its bulk
    connection `bulk`. A session that ends without `Bye` gives back rows whose answers did not reach
    it.
    """

    def __init__(
        self,
        sessions: Sessions,
        blocks: BlockTable,
        capacity: Capacity,
        rows: RowRequests,
        memory: MemoryRequests,
        cleanup: BlockCleanup,
    ) -> None:
        self._sessions = sessions
        self._blocks = blocks
        self._capacity = capacity
        self._rows = rows
        self._memory = memory
        self._cleanup = cleanup
        self.bulk: BulkServer | None = None

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """Message type -> its handler."""
        return {
            Hello: self._hello,
            Bye: lambda caller, _: self._bye(caller),
            Cancel: self._cancel,
            ReleaseLeases: self._release_leases,
        }

    def received(self, session: bytes, requests: Sequence[int]) -> None:
        """The answers of these requests have reached their callers."""
        found = self._sessions.find(session)
        if found is not None:
            found.unacknowledged.confirm(requests)

    def disconnected(self, session: bytes) -> None:
        """The connection for control messages has ended; the process may live, and so do its
        leases."""
        found = self._sessions.find(session)
        if found is not None:
            if found.remote:
                hang_up(found.pidfd)
            self._drop(session)

    def died(self, session: bytes) -> None:
        """The client's process has ended, and its leases with it."""
        if self._sessions.find(session) is not None:
            self._drop(session)
        self._blocks.release(session)
        self._forget(session)
        self._cleanup.run()

    def _hello(self, caller: Caller, message: Hello) -> Done:
        self._sessions.check_new(caller.session)
        process = message.process
        name = f"session {caller.session.hex()} of another host" if process is None else f"pid {process.pid}"
        lifeline = self._lifeline(caller.session, process)
        self._sessions.open(caller.session, lifeline, remote=process is None, name=name)
        return Done()

    def _lifeline(self, session: bytes, process: ProcessId | None) -> int:
        """A file descriptor that becomes readable when the client is gone."""
        if process is not None:
            return open_pidfd(process, "The client")
        connection = self.bulk.claim(session) if self.bulk is not None else None
        if connection is None:
            raise WireError("A client that names no process needs a bulk connection to the controller first.")
        return connection

    def _bye(self, caller: Caller) -> Done:
        self._sessions.get(caller.session)
        self._depart(caller.session)
        return Done()

    def _cancel(self, caller: Caller, message: Cancel) -> None:
        waiting = self._sessions.unpark(Caller(caller.session, message.request))
        if waiting is not None:
            waiting.leave()
        session = self._sessions.find(caller.session)
        taken = session.unacknowledged.pop(message.request) if session is not None else None
        if taken is not None:
            self._give_back(caller.session, taken)
        self._memory.serve()

    def _release_leases(self, caller: Caller, message: ReleaseLeases) -> None:
        self._blocks.release(caller.session, message.leases)
        self._forget(caller.session)
        self._cleanup.run()

    def _give_back(self, session: bytes, taken: Taken) -> None:
        if isinstance(taken, TakenRows):
            self._rows.give_back(taken)
        else:
            self._capacity.abandon(session, taken)

    def _drop(self, session: bytes) -> None:
        unacknowledged = self._sessions.get(session).unacknowledged
        self._depart(session)
        for rows in unacknowledged.pop_rows():
            self._rows.give_back(rows)

    def _depart(self, session: bytes) -> None:
        """End a session whose process may still read what it has leased."""
        ended = self._sessions.depart(session)
        self._memory.end_session(session, remote=ended.remote)
        self._forget(session)

    def _forget(self, session: bytes) -> None:
        if not self._blocks.has_leases(session):
            self._sessions.forget(session)
