"""Bytes move in pieces, with a check of the deadline between them."""

from __future__ import annotations

import asyncio

import pytest

from rl_ckpt_engine.payload.block_stream import CHUNK_BYTES, Deadline, emit
from rl_ckpt_engine.payload.digests import BLOCK_BYTES
from rl_ckpt_engine.testing import make_weights
from rl_protocol.errors import WeightSyncError


class Written:
    """A target that records the pieces."""

    unordered = False

    def __init__(self, after_each=lambda: None) -> None:
        self.started: list[tuple[str, int]] = []
        self.pieces: list[tuple[int, int]] = []
        self.after_each = after_each

    def start(self, weight, offset: int) -> bool:
        self.started.append((weight.name, offset))
        return True

    def write(self, offset: int, piece: memoryview) -> None:
        self.pieces.append((offset, piece.nbytes))
        self.after_each()


def test_a_tensor_of_several_chunks_is_stopped_between_them() -> None:
    deadline = Deadline(60, "Sending version 1", "engine x")
    target = Written(lambda: deadline.cancel("enough"))
    with pytest.raises(WeightSyncError, match=r"Sending version 1 \(engine x\) was stopped: enough"):
        asyncio.run(emit(make_weights([(CHUNK_BYTES // 2,)]), target, deadline))
    assert sum(size for _, size in target.pieces) == CHUNK_BYTES


def test_pieces_cover_each_tensor_once() -> None:
    target = Written()
    sizes = [BLOCK_BYTES + 3, 0, 5]
    weights = make_weights([(size,) for size in sizes], dtype="uint8")
    entries = asyncio.run(emit(weights, target, Deadline(60, "Sending", "x")))
    second = entries[1].offset
    assert second == BLOCK_BYTES + 64
    assert target.pieces == [(0, BLOCK_BYTES), (BLOCK_BYTES, 3), (second, 5)]
    assert [entry.nbytes for entry in entries] == sizes
