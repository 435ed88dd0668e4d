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
    for put in recovered.puts:
        rows = np.flatnonzero(~np.isin(np.array(put.generations, np.int64), gone))
        if rows.size:
            ledger.restore(put, rows)
    ledger.skip_generations(recovered.last_generation)
    for its in consumed:
        ledger.restore_consumption(its.partition, its.task, its.generations)
