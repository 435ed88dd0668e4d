"""What follows when rows leave blocks: memory is freed, leases are revoked, sparse blocks are
copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import Replies, check_done
from rl_transferqueue.controller.rows.block_table import Block
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.storage_units import StorageUnits
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.messages import NOTICE, Answer, Copy, Done, Free, Measure, Measured, Revoked
from rl_transferqueue.wire.spans import Span, rounded


class BlockCleanup:
    """Does what `BlockTable` has collected.

    Args:
        on_freed: called when memory became free or idle.
        stored: a backend holds the blocks; their memory is free once the backend has removed them.
    """

    def __init__(
        self,
        ledger: Ledger,
        capacity: Capacity,
        units: StorageUnits,
        replies: Replies,
        on_freed: Callable[[], None],
        *,
        stored: bool,
    ) -> None:
        self._ledger = ledger
        self._blocks = ledger.blocks
        self._capacity = capacity
        self._units = units
        self._replies = replies
        self._on_freed = on_freed
        self._stored = stored

    def run(self) -> None:
        """Free memory, revoke leases and start to copy sparse blocks; call it after each change of
        rows or leases."""
        if not self._blocks.unsettled:
            return
        released = self._blocks.take_released()
        if self._stored:
            self._remove([ref.span for ref in released])
            released = []
        for ref in released:
            self._capacity.give(ref.span)
        for session, blocks in self._blocks.take_revoked().items():
            self._replies.answer(Caller(session, NOTICE), Revoked(tuple(blocks)))
        if released:
            self._on_freed()
            self._blocks.retry_compactions()
        for block in self._blocks.take_sparse():
            self._compact(block, self._ledger.plan_compaction(block))

    def _remove(self, spans: Sequence[Span]) -> None:
        """Have the backend remove blocks; their memory is free when it has answered."""
        for unit in {span.unit for span in spans if span.unit in self._units}:
            request = Free(tuple(span for span in spans if span.unit == unit))

            def removed(answer: Answer, request: Free = request) -> None:
                check_done(answer, request)
                for span in request.spans:
                    self._capacity.give(span)
                self._on_freed()

            self._units.send(unit, request, removed)

    def _compact(self, block: Block, plan: Measure) -> None:
        """Ask the unit how large a copy would be and, if that saves memory, have it copied."""
        unit = block.ref.span.unit

        def measured(answer: Answer) -> None:
            gain = isinstance(answer, Measured) and rounded(answer.payload) < block.ref.span.nbytes
            target = self._capacity.take(unit, answer.payload) if isinstance(answer, Measured) and gain else None
            if not isinstance(answer, Measured) or target is None:
                self._ledger.end_compaction(block, plan, None, no_gain=not gain)
                self.run()
                self._on_freed()
                return

            def copied(done: Answer) -> None:
                ok = isinstance(done, Done)
                if not ok:
                    self._capacity.give(target)
                self._ledger.end_compaction(block, plan, (target, answer.header) if ok else None, no_gain=not ok)
                self.run()
                self._on_freed()

            self._units.send(unit, Copy(plan.source, plan.header, plan.rows, plan.fields, target), copied)

        self._units.send(unit, plan, measured)
