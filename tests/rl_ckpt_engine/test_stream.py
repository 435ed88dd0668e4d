"""Bytes move in pieces, and the clock is looked at between them."""

from __future__ import annotations

import asyncio

import pytest

from rl_ckpt_engine.stream import PIECE_BYTES, Deadline, emit
from rl_ckpt_engine.testing import make_weights
from rl_protocol.errors import WeightSyncError


class Written:
    """A target that notes the pieces."""

    def __init__(self, after_each=lambda: None) -> None:
        self.started: list[tuple[str, int]] = []
        self.pieces: list[tuple[int, int]] = []
        self.after_each = after_each

    def start(self, weight, offset: int) -> None:
        self.started.append((weight.name, offset))

    def write(self, offset: int, piece: memoryview) -> None:
        self.pieces.append((offset, piece.nbytes))
        self.after_each()


def test_a_tensor_of_several_pieces_is_stopped_between_them() -> None:
    deadline = Deadline(60, "Sending version 1", "engine x")
    target = Written(lambda: deadline.cancel("enough"))
    with pytest.raises(WeightSyncError, match=r"Sending version 1 \(engine x\) was stopped: enough"):
        asyncio.run(emit(make_weights([(PIECE_BYTES // 2,)]), target, deadline))
    assert target.pieces == [(0, PIECE_BYTES)]


def test_pieces_cover_each_tensor_once() -> None:
    target = Written()
    sizes = [PIECE_BYTES + 3, 0, 5]
    weights = make_weights([(size,) for size in sizes], dtype="uint8")
    entries = asyncio.run(emit(weights, target, Deadline(60, "Sending", "x")))
    second = entries[1].offset
    assert second == PIECE_BYTES + 64
    assert target.pieces == [(0, PIECE_BYTES), (PIECE_BYTES, 3), (second, 5)]
    assert [entry.nbytes for entry in entries] == sizes
