"""Operations on a BatchData in one process, beside the padded TensorDict of verl's DataProto.

    uv run --group bench pytest benchmarks

One group of pytest-benchmark per operation. The padded side holds the same rows as [N, longest]
tensors; `copy` is a memcpy of the batch's bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rl_protocol import BatchData, RaggedColumn, balanced_parts, wire

ROWS, PARTS = 512, 8
COLUMNS = {"prompts": "int64", "responses": "int64", "response_mask": "bool", "old_log_probs": "float32"}


def make_batch() -> BatchData:
    """512 rows of 64 to 256 prompt and 16 to 1,024 response tokens, most of them short."""
    rng = np.random.default_rng(0)
    lengths = {
        "prompts": rng.integers(64, 257, ROWS),
        "responses": np.clip(rng.exponential(256, ROWS).astype(np.int64), 16, 1024),
    }

    def column(name: str, dtype: str) -> RaggedColumn:
        offsets = np.concatenate([[0], np.cumsum(lengths["prompts" if name == "prompts" else "responses"])])
        flat = rng.integers(0, 2 if dtype == "bool" else 32_000, offsets[-1]).astype(dtype)
        return RaggedColumn(flat, offsets.astype(np.int64), dtype)

    return BatchData({name: column(name, dtype) for name, dtype in COLUMNS.items()})


def padded(batch: BatchData) -> TensorDict:
    """The rows of all columns, zeros behind them up to the longest."""

    def tensor(name: str) -> torch.Tensor:
        column = batch.ragged(name)
        out = np.zeros((len(column), int(column.lengths.max())), column.values.dtype)
        out[np.arange(out.shape[1]) < column.lengths[:, None]] = column.values
        return torch.from_numpy(out)

    return TensorDict({name: tensor(name) for name in COLUMNS}, batch_size=[ROWS])


BATCH = make_batch()
PADDED = padded(BATCH)
HALF = np.random.default_rng(1).permutation(ROWS)[: ROWS // 2]
TOKENS = BATCH.ragged("prompts").lengths + BATCH.ragged("responses").lengths
PARTS_OURS, PARTS_PADDED = BATCH.chunk(PARTS), PADDED.chunk(PARTS)
WIRE, PICKLED = b"".join(wire.encode(BATCH)), pickle.dumps(PADDED)
BLOCK = np.zeros(BATCH.nbytes, np.uint8)

OPERATIONS: dict[str, dict[str, Callable[[], object]]] = {
    "copy": {"memcpy": BLOCK.copy},
    "select half of the rows": {
        "ours": lambda: BATCH.select_rows(HALF),
        "padded TensorDict": lambda: PADDED[torch.from_numpy(HALF)],
    },
    "cut into 8 parts": {"ours": lambda: BATCH.chunk(PARTS), "padded TensorDict": lambda: PADDED.chunk(PARTS)},
    "join 8 parts": {
        "ours": lambda: BatchData.concat(PARTS_OURS),
        "padded TensorDict": lambda: torch.cat(list(PARTS_PADDED)),
    },
    "to bytes": {"ours": lambda: b"".join(wire.encode(BATCH)), "padded TensorDict": lambda: pickle.dumps(PADDED)},
    "from bytes": {"ours": lambda: wire.decode(WIRE), "padded TensorDict": lambda: pickle.loads(PICKLED)},
    "balance over 8 ranks": {"ours": lambda: balanced_parts(TOKENS, PARTS)},
}
SUBJECTS = [(operation, subject) for operation, by_subject in OPERATIONS.items() for subject in by_subject]


@pytest.mark.parametrize(("operation", "subject"), SUBJECTS)
def test_operation(benchmark: Any, operation: str, subject: str) -> None:
    """Time one operation of one subject."""
    benchmark.group = operation
    benchmark.extra_info.update(operation=operation, subject=subject, mib=BATCH.nbytes / 2**20)
    benchmark(OPERATIONS[operation][subject])
