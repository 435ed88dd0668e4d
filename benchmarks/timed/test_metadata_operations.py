"""Operations on the names of 16,384 rows: what the driver does between two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_protocol import KVBatchMeta, RowKey

ROWS, PARTS = 16_384, 8
KEYS = tuple(str(RowKey(f"prompt-{row // 8}", row % 8, 0)) for row in range(ROWS))
LENGTHS = np.random.default_rng(0).integers(16, 1024, ROWS)
META = KVBatchMeta(
    partition="train",
    keys=KEYS,
    tags=tuple({"status": "finished", "tokens": int(length)} for length in LENGTHS),
    fields=("prompts", "responses", "response_mask", "old_log_probs"),
)
PIECES = META.chunk(PARTS)
SHUFFLED = [KEYS[row] for row in np.random.default_rng(1).permutation(ROWS)]

OPERATIONS: dict[str, Callable[[], object]] = {
    "cut names into 8 parts": lambda: META.chunk(PARTS),
    "join names of 8 parts": lambda: KVBatchMeta.concat(PIECES),
    "select all names in another order": lambda: META.select_keys(SHUFFLED),
    "balance names over 8 ranks": lambda: META.split_balanced(LENGTHS, PARTS),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(benchmark: Any, operation: str) -> None:
    """Time one operation."""
    benchmark.group = operation
    benchmark.extra_info.update(operation=operation, subject="KVBatchMeta", rows=ROWS)
    benchmark(OPERATIONS[operation])
