"""Compares blocks in the memory of other hosts with the digests of their puts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from rl_transferqueue.controller.rows.block_table import Block
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import Answer, ComputeDigest, Digest, UnitRequest

Compared: TypeAlias = Callable[[Sequence[Block]], None]


@dataclass(eq=False, slots=True)
class _Comparison:
    """The blocks of one request."""

    waiting: dict[int, Block]
    """By slot, those whose units have not answered."""
    done: Compared
    different: list[Block] = field(default_factory=list[Block])


class RemoteDigests:
    """Has the units compute digests in their own memory, so that no block crosses the network.

    Args:
        send: `StorageUnits.send`.
    """

    def __init__(self, send: Callable[[int, UnitRequest, Callable[[Answer], None]], None]) -> None:
        self._send = send
        self._open: dict[Caller, _Comparison] = {}

    def compare(self, caller: Caller, blocks: Sequence[Block], done: Compared) -> None:
        """Call `done` with those of the blocks that differ from the digests of their puts, once all
        units have answered or ended, unless the caller leaves before."""
        comparison = self._open[caller] = _Comparison({block.ref.slot: block for block in blocks}, done)
        for block in blocks:
            request = ComputeDigest(block.ref.span, unpack_header(block.header).payload)
            self._send(block.ref.span.unit, request, partial(self._take, caller, comparison, block))

    def leave(self, caller: Caller) -> None:
        """Drop the comparison of a caller that no longer waits."""
        self._open.pop(caller, None)

    def lose(self, unit: int) -> None:
        """A unit has ended, so it answers nothing more."""
        for caller, comparison in list(self._open.items()):
            lost = [slot for slot, block in comparison.waiting.items() if block.ref.span.unit == unit]
            for slot in lost:
                del comparison.waiting[slot]
            self._end(caller, comparison)

    def _take(self, caller: Caller, comparison: _Comparison, block: Block, answer: Answer) -> None:
        del comparison.waiting[block.ref.slot]
        if not isinstance(answer, Digest) or answer.digest != block.digest:
            comparison.different.append(block)
        self._end(caller, comparison)

    def _end(self, caller: Caller, comparison: _Comparison) -> None:
        if not comparison.waiting and self._open.get(caller) is comparison:
            del self._open[caller]
            comparison.done(comparison.different)
