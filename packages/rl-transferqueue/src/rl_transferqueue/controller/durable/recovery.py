"""Puts the rows of a journal back into a plane that starts."""

from __future__ import annotations

import numpy as np

from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.journal.records import Recovered


def restore(recovered: Recovered, ledger: Ledger) -> None:
    """Add all rows whose every put was read; no task has consumed them, and their columns come to
    memory when they are read."""
    gone = np.array([*recovered.cleared, *recovered.report.rows_incomplete], np.int64)
    for put in recovered.puts:
        rows = np.flatnonzero(~np.isin(np.array(put.generations, np.int64), gone))
        if rows.size:
            ledger.restore(put, rows)
