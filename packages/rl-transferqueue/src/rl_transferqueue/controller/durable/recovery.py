"""Puts the rows of a journal back into a plane that starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from rl_protocol.errors import ConfigError
from rl_transferqueue.controller.durable.durable_rows import PAYLOAD
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.journal.records import Recovered
from rl_transferqueue.wire.spans import Span


def restore(recovered: Recovered, ledger: Ledger, capacity: Capacity, memory: Callable[[Span], memoryview]) -> None:
    """Add all rows whose every put was read; no task has consumed them.

    Raises:
        ConfigError: the units have too little memory.
    """
    gone = np.array([*recovered.cleared, *recovered.report.rows_incomplete], np.int64)
    turn = 0
    for put in recovered.puts:
        rows = np.flatnonzero(~np.isin(np.array(put.generations, np.int64), gone))
        if not rows.size:
            continue
        block = None
        payload = put.columns.get(PAYLOAD)
        if payload is not None:
            turn += 1
            block = _room(capacity, turn, len(payload))
            memory(block)[: len(payload)] = payload
        ledger.restore(put, rows, block)


def _room(capacity: Capacity, turn: int, nbytes: int) -> Span:
    units = list(capacity.running)
    start = turn % len(units)
    for unit in _rotated(units, start):
        span = capacity.take(unit, nbytes)
        if span is not None:
            return span
    raise ConfigError(
        f"The rows of the journal do not fit into {capacity.total} bytes of storage units, of which {capacity.used} are used when {nbytes} "
        "more are needed; raise TransferQueueConfig.capacity_mb."
    )


def _rotated(units: list[int], start: int) -> Iterable[int]:
    return (*units[start:], *units[:start])
