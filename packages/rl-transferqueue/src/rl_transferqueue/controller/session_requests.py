"""Requests about sessions, and the ends of sessions: goodbye, a lost connection, a dead process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rl_protocol.errors import WireError
from rl_protocol.support.host_identity import this_host
from rl_transferqueue.controller.block_cleanup import BlockCleanup
from rl_transferqueue.controller.durable.absent_sessions import AbsentSessions, refused
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import MemoryRequests
from rl_transferqueue.controller.put_answers import PutAnswers
from rl_transferqueue.controller.row_requests import RowRequests
from rl_transferqueue.controller.rows.block_table import BlockTable
from rl_transferqueue.controller.sessions import Session, Sessions
from rl_transferqueue.controller.storage_units import StorageUnits
from rl_transferqueue.controller.unacknowledged import Taken, TakenRows
from rl_transferqueue.transport.bulk_protocol import hang_up
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.control_server import Caller, Handler
from rl_transferqueue.wire.messages import Bye, Cancel, Done, Hello, ReleaseLeases, Resume, Resumed
from rl_transferqueue.wire.process_liveness import ProcessId, open_pidfd


class SessionRequests:
    """Opens sessions and ends them.

    A client on this host is watched through a pidfd, a client on another host through its bulk
    connection `bulk`. A session that ends without `Bye` gives back rows whose answers did not reach
    it. If its client maps memory of units of another host, its reservations and leases stay until
    its process has ended: a connection that breaks does not stop it from writing and reading there.
    """

    def __init__(
        self,
        sessions: Sessions,
        blocks: BlockTable,
        capacity: Capacity,
        rows: RowRequests,
        memory: MemoryRequests,
        cleanup: BlockCleanup,
        units: StorageUnits,
    ) -> None:
        self._units = units
        self._sessions = sessions
        self._blocks = blocks
        self._capacity = capacity
        self._rows = rows
        self._memory = memory
        self._cleanup = cleanup
        self.bulk: BulkServer | None = None
        self.incarnation = 1
        self.answers: Mapping[bytes, Mapping[int, bytes]] = {}
        """Of the sessions of the controller before: put -> packed generations of its rows."""
        self.absent: AbsentSessions | None = None
        """The sessions that a successor waits for."""

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """Message type -> its handler."""
        return {
            Hello: self._hello,
            Resume: self._resume,
            Bye: lambda caller, _: self._bye(caller),
            Cancel: self._cancel,
            ReleaseLeases: self._release_leases,
        }

    def received(self, session: bytes, requests: Sequence[int]) -> None:
        """The answers of these requests have reached their callers."""
        found = self._sessions.find(session)
        if found is not None:
            rows = found.unacknowledged.confirm(requests)
            if rows and self._rows.consumed is not None:
                self._rows.consumed.confirm(session, rows)

    def disconnected(self, session: bytes) -> None:
        """The connection for control messages has ended; the process may live, and so do its
        leases."""
        found = self._sessions.find(session)
        if found is not None:
            if found.remote:
                hang_up(found.pidfd)
            self._drop(session, gone=False)

    def died(self, session: bytes) -> None:
        """The client's process has ended, and its leases with it. A client on another host may
        live: only its connection has ended for certain."""
        found = self._sessions.find(session)
        if found is not None:
            self._drop(session, gone=not found.remote)
        departed = self._sessions.departed(session)
        if departed is not None:
            self._once_gone(departed, lambda: self._release_all(session))

    def _release_all(self, session: bytes) -> None:
        self._blocks.release(session)
        self._forget(session)
        self._cleanup.run()
        self._memory.serve()

    def _once_gone(self, ended: Session, act: Callable[[], None]) -> None:
        """Act once the client of a session can't touch memory of the plane any more."""
        if ended.remote and ended.process is not None:
            self._units.when_ended(ended.host, ended.process, act)
        else:
            act()

    def _hello(self, caller: Caller, message: Hello) -> Done:
        self._sessions.check_new(caller.session)
        process, host = message.process, message.host
        near = process is not None and host in ("", this_host())
        name = f"pid {process.pid}" if near and process else f"session {caller.session.hex()} of another host"
        lifeline = self._lifeline(caller.session, process if near else None)
        self._sessions.open(caller.session, lifeline, remote=not near, name=name, host=host, process=process)
        if self._rows.consumed is not None:
            self._rows.consumed.open_session(caller.session, process if near else None)
        return Done()

    def _resume(self, caller: Caller, message: Resume) -> Resumed:
        """Continue a session of the controller before."""
        if message.incarnation != self.incarnation:
            raise WireError(
                f"This is incarnation {self.incarnation} of the plane's controller; the client asks for {message.incarnation}."
            )
        consumed = self._rows.consumed
        if consumed is not None and consumed.has_ended(caller.session):
            raise refused()
        if self.absent is not None:
            self.absent.came_back(caller.session)
        self._hello(caller, Hello(message.process, message.host))
        session = self._sessions.get(caller.session)
        session.puts = PutAnswers.restored(self.answers.get(caller.session, {}))
        if consumed is not None:
            self._rows.resume(consumed, caller.session, set(message.unanswered))
        made = ((put, session.puts.made(put)) for put in message.unanswered)
        return Resumed(tuple((put, generations) for put, generations in made if generations is not None))

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
        ended = self._sessions.depart(caller.session)
        self._memory.end_session(caller.session, remote=ended.remote)
        self._forget(caller.session)
        if self._rows.consumed is not None:
            self._rows.consumed.end_session(caller.session, gone=True)
        return Done()

    def _cancel(self, caller: Caller, message: Cancel) -> None:
        waiting = self._sessions.unpark(Caller(caller.session, message.request))
        if waiting is not None:
            waiting.leave()
        session = self._sessions.find(caller.session)
        taken = None
        if session is not None:
            taken = session.unacknowledged.pop(message.request)
            session.puts.leave(message.request)
        if taken is not None:
            self._give_back(caller.session, taken)
            if isinstance(taken, TakenRows) and self._rows.consumed is not None:
                self._rows.consumed.confirm(caller.session, [message.request])
        self._memory.serve()

    def _release_leases(self, caller: Caller, message: ReleaseLeases) -> None:
        self._blocks.release(caller.session, message.leases)
        self._forget(caller.session)
        self._cleanup.run()
        self._memory.serve()

    def _give_back(self, session: bytes, taken: Taken) -> None:
        if isinstance(taken, TakenRows):
            self._rows.give_back(taken)
        else:
            self._capacity.abandon(session, taken)

    def _drop(self, session: bytes, *, gone: bool) -> None:
        """End a session whose process may still read what it has leased; `gone`: it has ended."""
        ended = self._sessions.depart(session)
        self._once_gone(ended, lambda: self._memory.end_session(session, remote=ended.remote))
        self._forget(session)
        for rows in ended.unacknowledged.pop_rows():
            self._rows.give_back(rows)
        if self._rows.consumed is not None:
            self._rows.consumed.end_session(session, gone=gone)

    def _forget(self, session: bytes) -> None:
        if not self._blocks.has_leases(session):
            self._sessions.forget(session)
