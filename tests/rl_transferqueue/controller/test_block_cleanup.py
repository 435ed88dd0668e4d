"""`BlockCleanup`, without sockets: freeing, revoking, and compacting blocks that lose rows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from controller_fakes import FakeReplies, FakeUnits

from rl_protocol import BatchData, dense
from rl_protocol.wire import plan
from rl_transferqueue.controller.block_cleanup import BlockCleanup
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.messages import NOTICE, Copy, Done, Failure, Free, Measure, Measured, Revoked

SESSION = b"session1"
ROWS = 16
BATCH = BatchData({"x": dense(np.zeros((ROWS, 512), np.uint8))})
KEYS = tuple(f"k{i}" for i in range(ROWS))


class Plane:
    def __init__(self, *, stored: bool = False) -> None:
        self.units, self.replies, self.freed = FakeUnits(), FakeReplies(), 0
        self.ledger, self.capacity = Ledger(), Capacity(1, 1 << 16)
        self.cleanup = BlockCleanup(
            self.ledger, self.capacity, self.units, self.replies, self.count_freed, stored=stored
        )
        header = plan(BATCH)
        self.span = self.capacity.reserve(SESSION, header.payload)
        assert self.span is not None
        self.ledger.commit("p", KEYS, (), self.span, msgspec.msgpack.encode(header))
        self.capacity.commit(SESSION, self.span)

    def count_freed(self) -> None:
        self.freed += 1

    def clear(self, rows: int) -> None:
        self.ledger.clear("p", KEYS[:rows])
        self.cleanup.run()


def test_a_block_without_rows_is_free_at_once() -> None:
    plane = Plane()
    plane.clear(ROWS)
    assert (plane.capacity.used, plane.freed, plane.units.sent) == (0, 1, [])


def test_a_block_without_rows_that_is_read_is_revoked_and_free_after_the_lease() -> None:
    plane = Plane()
    block = plane.ledger.locate(SESSION, 1, "p", KEYS, ("x",)).blocks[0]
    plane.clear(ROWS)
    assert plane.replies.take() == [(Caller(SESSION, NOTICE), Revoked((block.id,)))]
    assert plane.freed == 0
    plane.ledger.blocks.release(SESSION)
    plane.cleanup.run()
    assert (plane.capacity.used, plane.freed) == (0, 1)


def test_a_block_of_a_backend_is_free_when_the_backend_has_removed_it() -> None:
    plane = Plane(stored=True)
    plane.clear(ROWS)
    assert (plane.capacity.used, plane.freed) == (plane.span.nbytes, 0)
    assert plane.units.reply() == Free((plane.span,))
    assert (plane.capacity.used, plane.freed) == (0, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_sparse_block_is_measured_then_copied(fails: bool) -> None:
    plane = Plane()
    plane.clear(ROWS - 4)
    small = plan(BATCH.select_rows(np.arange(4)))
    request = plane.units.reply(Measured(msgspec.msgpack.encode(small), small.payload))
    assert isinstance(request, Measure)
    copy = plane.units.reply(Failure("WireError", "no") if fails else Done())
    assert isinstance(copy, Copy)
    assert copy.target.nbytes < plane.span.nbytes
    assert plane.capacity.used == (plane.span.nbytes if fails else copy.target.nbytes)
    assert plane.units.sent == []


def test_a_copy_that_would_save_nothing_is_not_made() -> None:
    plane = Plane()
    plane.clear(ROWS - 4)
    plane.units.reply(Measured(b"", plane.span.nbytes))
    assert plane.units.sent == []
    assert plane.capacity.used == plane.span.nbytes


def test_a_sparse_block_that_found_no_memory_for_its_copy_is_free_with_its_last_row() -> None:
    plane = Plane()
    rest = plane.capacity.reserve(SESSION, plane.capacity.capacity - plane.span.nbytes)
    plane.clear(ROWS - 4)
    small = plan(BATCH.select_rows(np.arange(4)))
    plane.units.reply(Measured(msgspec.msgpack.encode(small), small.payload))
    assert (plane.units.sent, plane.freed) == ([], 1)
    plane.clear(ROWS)
    assert rest is not None
    assert (plane.capacity.used, plane.freed) == (rest.nbytes, 2)
