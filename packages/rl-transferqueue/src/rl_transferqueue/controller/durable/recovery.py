"""Puts the rows of a journal back into a plane that starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_transferqueue.controller.durable.consumed_rows import Consumed
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.journal.records import Recovered


def restore(recovered: Recovered, ledger: Ledger, consumed: Sequence[Consumed] = ()) -> None:
    """Add all rows whose every put was read; only those in `consumed` are consumed, and their
    columns come to memory when they are read."""
    gone = np.array([*recovered.cleared, *recovered.report.rows_incomplete], np.int64)
    rows_of = [np.flatnonzero(~np.isin(np.array(put.generations, np.int64), gone)) for put in recovered.puts]
    by_age: dict[str, dict[int, str]] = {}
    for put, rows in zip(recovered.puts, rows_of, strict=True):
        there = ((put.generations[row], put.keys[row]) for row in rows.tolist())
        by_age.setdefault(put.partition, {}).update(there)
    for partition, keys in by_age.items():
        ledger.restore_rows(partition, dict(sorted(keys.items())))
    for put, rows in zip(recovered.puts, rows_of, strict=True):
        if rows.size:
            ledger.restore(put, rows)
    ledger.skip_generations(recovered.last_generation)
    for its in consumed:
        ledger.restore_consumption(its.partition, its.task, its.generations)
