"""`RemoteBlocks` against the bulk server of a storage unit, without a plane."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from network_helpers import NO_KEY, running

from rl_protocol.errors import PlaneLostError, RLError, WireError
from rl_protocol.support.host_identity import this_host
from rl_transferqueue.controller.durable.remote_blocks import RemoteBlocks
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.process_liveness import this_process
from rl_transferqueue.wire.spans import Span

ARENA = bytes(range(256)) * (1 << 14)
UNIT = 3


@contextmanager
def blocks_of(
    port: int,
) -> Iterator[tuple[RemoteBlocks, Callable[[int, int], None], queue.SimpleQueue[bytes | RLError]]]:
    """Blocks of the unit at a port, a function that starts a fetch, and what was fetched."""
    reactor, found = Reactor(), queue.SimpleQueue[bytes | RLError]()
    unit = UnitAddress("", this_process(), -1, len(ARENA), bulk=f"127.0.0.1:{port}", host=this_host())
    blocks = RemoteBlocks(reactor, NO_KEY, incarnation=1)
    blocks.add(UNIT, unit)

    def fetch(offset: int, nbytes: int) -> None:
        blocks.fetch(Span(UNIT, offset, nbytes), nbytes, found.put)

    with running(reactor):
        yield blocks, fetch, found
    blocks.close()


@pytest.fixture
def unit() -> Iterator[BulkServer]:
    reactor = Reactor()
    server = BulkServer(reactor, "127.0.0.1", NO_KEY, memoryview(bytearray(ARENA)))
    with running(reactor):
        yield server
    server.close()


def test_blocks_are_read_in_order_also_after_one_that_is_refused(unit: BulkServer) -> None:
    with blocks_of(unit.port) as (_, fetch, found):
        fetch(64, 1 << 20)
        fetch(len(ARENA) - 64, 128)
        fetch(128, 64)
        assert found.get(timeout=60) == ARENA[64 : 64 + (1 << 20)]
        assert isinstance(found.get(timeout=60), WireError)
        assert found.get(timeout=60) == ARENA[128:192]


def test_memory_that_belongs_to_a_later_controller_is_not_read(unit: BulkServer) -> None:
    unit.renew(memoryview(bytearray(len(ARENA))), 2)
    with blocks_of(unit.port) as (_, fetch, found):
        fetch(0, 64)
        assert isinstance(found.get(timeout=60), PlaneLostError)


def test_reads_of_a_unit_that_is_lost_fail_at_once() -> None:
    """It accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent, blocks_of(silent.getsockname()[1]) as (blocks, fetch, found):
        fetch(0, 64)
        fetch(64, 64)
        peer, _ = silent.accept()
        blocks.lose(UNIT)
        peer.close()
        for _ in range(2):
            assert isinstance(found.get(timeout=60), PlaneLostError)
