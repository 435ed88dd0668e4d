"""The controller of a plane: its state and its collaborators, behind one table of handlers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from pathlib import Path

from rl_protocol.errors import BatchError, PlaneLostError, PlaneTimeout, WireError
from rl_protocol.support.host_identity import this_host
from rl_transferqueue.controller.block_cleanup import BlockCleanup
from rl_transferqueue.controller.controller_spec import ControllerSpec
from rl_transferqueue.controller.durable.absent_sessions import AbsentSessions
from rl_transferqueue.controller.durable.consumed_rows import ConsumedRows
from rl_transferqueue.controller.durable.durable_rows import DurableRows
from rl_transferqueue.controller.durable.journal_thread import JournalThread
from rl_transferqueue.controller.durable.recovery import restore
from rl_transferqueue.controller.durable.remote_blocks import Fetched, RemoteBlocks
from rl_transferqueue.controller.durable.remote_digests import RemoteDigests
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import MemoryRequests
from rl_transferqueue.controller.row_requests import RowRequests
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.session_requests import SessionRequests
from rl_transferqueue.controller.sessions import Sessions
from rl_transferqueue.controller.storage_units import StorageUnits
from rl_transferqueue.journal.records import ClearRecord, Recovered, RecoveryReport
from rl_transferqueue.memory.arena import map_memory
from rl_transferqueue.memory.block_epochs import SharedEpochs
from rl_transferqueue.transport.addresses import Endpoints, endpoint
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.control_server import Caller, Handler, Server
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.descriptor import PlaneDescriptor, UnitAddress
from rl_transferqueue.wire.messages import (
    Answer,
    ArenaMemory,
    DescribeMemory,
    Done,
    FindController,
    FoundController,
    GetMetrics,
    GetStats,
    JoinUnits,
    Metrics,
    Stats,
)
from rl_transferqueue.wire.spans import ALIGN, Span

log = logging.getLogger(__name__)


class Controller:
    """One controller. Lifecycle: it serves while its `reactor` runs, until `close`.

    Args:
        spec: sockets, sizes and journal.

    Raises:
        ConfigError, OutputError: the journal can't be used.
    """

    def __init__(self, spec: ControllerSpec) -> None:
        self.reactor = Reactor()
        self._spec = spec
        self._most_units = spec.hosts * len(spec.units)
        self._key: PlaneKey | None = None
        self._remote: RemoteBlocks | None = None
        self._epochs = SharedEpochs(self._most_units * spec.unit_bytes // ALIGN + 1)
        self._ledger = Ledger(self._epochs, spec.incarnation)
        self._capacity = Capacity(len(spec.units), spec.unit_bytes, this_host())
        self._units = StorageUnits(self.reactor, spec.units, spec.segment, self._lose_unit)
        for ended in set(range(len(spec.units))).difference(self._units):
            self._capacity.lose(ended)
        handlers: dict[type, Handler] = {}
        self.server = Server(
            self.reactor,
            spec.address,
            handlers,
            on_received=self._received,
            on_end=self._disconnected,
            incarnation=spec.incarnation,
        )
        blocks = self._ledger.blocks
        self._sessions = Sessions(self.reactor, self._died)
        self._memory = MemoryRequests(
            self._capacity, self._units, self._sessions, blocks, self.server, fence_all=spec.stored
        )
        self._cleanup = BlockCleanup(
            self._ledger, self._capacity, self._units, self.server, self._memory.serve, stored=spec.stored
        )
        self._digests = RemoteDigests(self._units.send)
        self._rows = RowRequests(
            self._ledger, self._capacity, self._memory, self._cleanup, self._sessions, self.server, self._digests
        )
        self._session_requests = SessionRequests(
            self._sessions, blocks, self._capacity, self._rows, self._memory, self._cleanup, self._units
        )
        self._session_requests.incarnation = spec.incarnation
        self._journal = (
            JournalThread(self.reactor, Path(spec.journal), each=spec.every_put, successor=spec.incarnation > 1)
            if spec.journal
            else None
        )
        self._rows.consumed = ConsumedRows(Path(spec.consumed)) if spec.consumed else None
        self._arenas: dict[int, mmap] = {}
        self._arena_fds: dict[int, int] = {}
        handlers.update(self._session_requests.handlers)
        handlers.update(self._memory.handlers)
        handlers.update(self._rows.handlers)
        handlers[GetStats] = self._stats
        handlers[GetMetrics] = self._metrics
        handlers[JoinUnits] = self._join
        handlers[FindController] = self._find
        self._joined = len(spec.units)

    @property
    def shared_memory(self) -> tuple[int, int]:
        """File descriptor and bytes of what clients map."""
        return self._epochs.fd, self._epochs.nbytes

    @property
    def arenas(self) -> tuple[int, ...]:
        """With a journal: file descriptor of the arena of each unit that had joined when this
        controller started, in the unit's process; -1: the unit has ended."""
        started = len(self._spec.units) + len(self._spec.joined)
        units = range(started if self._journal is not None else 0)
        return tuple(self._arena_fds.get(unit, -1) for unit in units)

    def listen(self, host: str, key: PlaneKey, port: int = 0, bulk_port: int = 0) -> Endpoints:
        """Also serve clients of other hosts: control messages at `port`, bytes at `bulk_port`; 0:
        at free ports."""
        self._key = key
        if self._journal is not None:
            self._remote = RemoteBlocks(self.reactor, key, self._spec.incarnation)
        self._join_again(key)
        bulk = self._session_requests.bulk = BulkServer(self.reactor, host, key, port=bulk_port)
        return Endpoints(self.server.listen(host, key, port), endpoint(host, bulk.port))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back once, when all units are connected, and rows of a journal are restored: from
        then on the end of each unit is noticed."""
        journal = self._journal
        self._units.when_ready(callback if journal is None else lambda: self._map_units(journal, callback))

    @property
    def recovery(self) -> RecoveryReport | None:
        """What the journal held; None: there is none."""
        return self._journal.recovered.report if self._journal is not None else None

    def close(self) -> None:
        """Write what the journal has not written, and close all sockets and descriptors."""
        if self._remote is not None:
            self._remote.close()
        if self._journal is not None:
            self._journal.close()
        if self._session_requests.absent is not None:
            self._session_requests.absent.close()
        if self._rows.consumed is not None:
            self._rows.consumed.close()
        self.server.close()
        if self._session_requests.bulk is not None:
            self._session_requests.bulk.close()
        self._units.close()
        self._sessions.close()

    def _map_units(self, journal: JournalThread, callback: Callable[[], None]) -> None:
        """Map the arenas of this host, which the journal reads and fills, and restore its rows."""
        missing = set(self._units)

        def described(unit: int, answer: Answer) -> None:
            assert isinstance(answer, ArenaMemory)
            self._arena_fds[unit] = answer.fd
            if self._capacity.is_here(unit):
                self._arenas[unit] = map_memory(answer.process, answer.fd, answer.nbytes, writable=True)
            missing.discard(unit)
            if not missing:
                self._restore(journal.recovered)
                journal.write(ClearRecord(journal.recovered.report.rows_incomplete), lambda _: None)
                self._rows.durable = DurableRows(
                    self._ledger,
                    self._capacity,
                    journal,
                    self._bytes_of,
                    self._fetch,
                    self.server,
                    self._rows,
                    verify=self._spec.verify,
                    keep_origins=self._rows.consumed is not None,
                )
                self._memory.first = self._rows.durable.loads.continue_loading
                self._memory.make_room = self._rows.durable.loads.make_room
                callback()

        for unit in self._units:
            self._units.send(unit, DescribeMemory(self._spec.incarnation), partial(described, unit))

    def _restore(self, recovered: Recovered) -> None:
        answers: dict[bytes, dict[int, bytes]] = {}
        for (session, request), generations in recovered.answers.items():
            answers.setdefault(session, {})[request] = generations
        self._session_requests.answers = answers
        consumed = self._rows.consumed
        restore(recovered, self._ledger, consumed.all() if consumed is not None else ())
        if consumed is not None:
            end = partial(self._rows.end_absent, consumed)
            absent = self._session_requests.absent = AbsentSessions(self.reactor, self._spec.successor_s, end)
            for session, process in consumed.awaited().items():
                absent.wait_for(session, process)

    def _bytes_of(self, span: Span) -> memoryview:
        return memoryview(self._arenas[span.unit])[span.offset : span.offset + span.nbytes]

    def _fetch(self, block: Span, nbytes: int, fetched: Fetched) -> None:
        assert self._remote is not None
        self._remote.fetch(block, nbytes, fetched)

    def _received(self, session: bytes, requests: Sequence[int]) -> None:
        self._session_requests.received(session, requests)

    def _disconnected(self, session: bytes) -> None:
        self._session_requests.disconnected(session)

    def _died(self, session: bytes) -> None:
        self._session_requests.died(session)

    def _lose_unit(self, unit: int) -> None:
        """The other units continue; rows in this one are read from the journal, or listed as lost
        without one."""
        self._memory.lose_unit(unit)
        if self._remote is not None:
            self._remote.lose(unit)
        self._rows.serve(self._ledger.lose_unit(unit))
        self._digests.lose(unit)
        self._cleanup.run()
        self._memory.serve()

    def _join(self, _: Caller, message: JoinUnits) -> Done:
        """Connect to units of another host; waits for their part of the handshake."""
        key, unit_bytes = self._key, self._capacity.capacity
        if key is None:
            raise BatchError("Units of other hosts join a plane that listens (TransferQueueConfig.listen).")
        for unit in message.units:
            if self._joined == self._most_units or unit.arena_bytes != unit_bytes:
                raise BatchError(
                    f"A plane takes {self._most_units} storage units of {unit_bytes} bytes; got another one, of {unit.arena_bytes} bytes."
                )
            self._units.join(self._joined, unit, key)
            self._add_joined(unit)
        self._memory.serve()
        return Done()

    def _add_joined(self, unit: UnitAddress) -> None:
        self._capacity.join(self._joined, unit.host)
        if self._remote is not None:
            self._remote.add(self._joined, unit)
        self._joined += 1

    def _join_again(self, key: PlaneKey) -> None:
        """Connect to the units that had joined the controller before; those that can't be reached
        have ended for this one."""
        silent = set[str]()
        for unit in self._spec.joined:
            number = self._joined
            self._add_joined(unit)
            try:
                if unit.host in silent:  # the wait for one unit of a host that is lost is enough
                    raise PlaneLostError(f"The host of storage unit {number} does not answer.")
                self._units.join(number, unit, key)
            except (PlaneLostError, PlaneTimeout) as error:
                log.warning("%s", error)
                if isinstance(error, PlaneTimeout):
                    silent.add(unit.host)
                self._lose_unit(number)

    def _find(self, *_: object) -> FoundController:
        if not self._spec.descriptor:
            raise WireError("The controller of this plane has no successor (start_local_plane(successor_s)).")
        return FoundController(self._spec.incarnation, PlaneDescriptor.load(Path(self._spec.descriptor)))

    def _stats(self, *_: object) -> Stats:
        contents, used = self._ledger.contents(), self._ledger.blocks.used
        return Stats(
            contents.rows,
            used,
            max(0, self._capacity.used - used),
            self._capacity.total,
            contents.lost,
            contents.columns,
            contents.tasks,
            self.server.links,
            self._rows.durable.damaged if self._rows.durable is not None else 0,
            self._rows.durable.loads.evicted if self._rows.durable is not None else 0,
        )

    def _metrics(self, *_: object) -> Metrics:
        counters = self.server.counters
        return Metrics(
            counters.operations(),
            counters.errors(),
            self._rows.columns.columns(),
            counters.bytes_sent,
            len(self._sessions),
            self._sessions.waiting,
            self._memory.waiting,
            self._memory.waiting_bytes,
        )
