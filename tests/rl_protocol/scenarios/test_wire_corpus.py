"""Committed frames stay readable; hostile ones use little memory. See make_wire_corpus.py."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from rl_protocol import WireError, wire

FRAMES = sorted(Path(__file__).with_name("wire_corpus").glob("*.bin"))
MEMORY = 256 << 10
"""Limit of the memory for reading a frame below 2 KiB, in bytes."""


def read(raw: bytes) -> None:
    """Decode a frame and read every value."""
    batch = wire.decode(raw)
    for column in batch.columns.values():
        for i in range(min(len(column), 10)):
            column.row(i)


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_a_frame_is_read_or_refused_within_bounds(path: Path):
    raw = path.read_bytes()
    assert len(raw) < 2048
    tracemalloc.start()
    began, refused = time.thread_time(), False
    try:
        read(raw)
    except WireError:
        refused = True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY
    assert time.thread_time() - began < 1
    expected = path.name.split("-")[0]
    assert expected == "any" or refused == (expected == "bad")


def test_the_corpus_is_there():
    kinds = [path.name.split("-")[0] for path in FRAMES]
    assert kinds.count("ok") >= 7
    assert kinds.count("any") >= 20
    assert kinds.count("bad") >= 35
    for path in FRAMES:
        if path.name.startswith("ok-"):
            assert b"".join(wire.encode(wire.decode(path.read_bytes()))) == path.read_bytes()
