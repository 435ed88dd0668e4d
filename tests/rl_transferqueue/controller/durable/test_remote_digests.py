"""Comparisons of blocks by the units of other hosts, whose answers a test gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from rl_protocol import BatchData, dense
from rl_protocol.wire import plan
from rl_transferqueue.controller.durable.remote_digests import RemoteDigests
from rl_transferqueue.controller.rows.block_table import Block
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.messages import Answer, ComputeDigest, Digest, UnitRequest
from rl_transferqueue.wire.spans import BlockRef, Span

HEADER = plan(BatchData({"x": dense(np.arange(4))}))
CALLER = Caller(b"session1", 7)


class World:
    """Units 2 and 3, and what a comparison has found."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, UnitRequest, Callable[[Answer], None]]] = []
        self.found: list[list[Block]] = []
        self.digests = RemoteDigests(lambda *request: self.asked.append(request))

    def compare(self, *blocks: Block) -> None:
        def done(different: Sequence[Block]) -> None:
            self.found.append(list(different))

        self.digests.compare(CALLER, blocks, done)

    def answer(self, digest: bytes) -> None:
        """Answer the oldest request."""
        self.asked.pop(0)[2](Digest(digest))


def block(slot: int, unit: int) -> Block:
    span = Span(unit, 4096 * slot, 4096)
    return Block(BlockRef(slot, span, slot), msgspec.msgpack.encode(HEADER), "p", 1, 1, digest=b"whole")


def test_a_comparison_ends_with_the_last_answer_and_has_the_blocks_that_differ() -> None:
    world, blocks = World(), [block(1, 2), block(2, 3)]
    world.compare(*blocks)
    assert [(unit, request) for unit, request, _ in world.asked] == [
        (it.ref.span.unit, ComputeDigest(it.ref.span, HEADER.payload)) for it in blocks
    ]
    world.answer(b"whole")
    assert world.found == []
    world.answer(b"other")
    assert [[it.ref.slot for it in found] for found in world.found] == [[2]]


def test_a_unit_that_ends_answers_nothing_more() -> None:
    world = World()
    world.compare(block(1, 2), block(2, 3))
    world.digests.lose(3)
    assert world.found == []
    world.answer(b"whole")
    assert world.found == [[]]
    world.compare(block(3, 3))
    world.digests.lose(2)
    world.digests.lose(3)
    assert world.found == [[], []]


def test_a_caller_that_has_left_gets_no_answer() -> None:
    world = World()
    world.compare(block(1, 2))
    world.digests.leave(CALLER)
    world.answer(b"other")
    assert world.found == []
