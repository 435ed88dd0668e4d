"""What a put has written, against its columns and tags."""

from __future__ import annotations

import numpy as np
from msgspec import msgpack

from rl_protocol import BatchData, dense
from rl_protocol.wire import plan
from rl_transferqueue.journal.metadata import StoredPut
from rl_transferqueue.journal.records import PutRecord
from rl_transferqueue.journal.segments import Place
from rl_transferqueue.journal.written_names import written_names
from rl_transferqueue.wire.tags import to_columns

KEYS = ("a", "b")


def stored(header: bytes = b"", tags: tuple[dict[str, int], ...] = (), *blocks: str) -> StoredPut:
    packed = msgpack.encode(to_columns(KEYS, tags))
    record = PutRecord(partition="p", keys=KEYS, generations=(7, 9), header=header, tags=packed)
    return StoredPut(1, record, {name: Place(0, 0, 8, b"") for name in blocks})


def test_columns_are_those_of_the_header_or_else_the_blocks() -> None:
    header = msgpack.encode(plan(BatchData({"x": dense(np.zeros(2)), "n": dense(np.zeros(2))})))
    assert written_names(stored(header, (), "payload")) == {("column", "x"), ("column", "n")}
    assert written_names(stored(b"", (), "x", "y")) == {("column", "x"), ("column", "y")}
    assert written_names(stored()) == frozenset()


def test_a_tag_is_no_column_and_may_be_of_some_rows() -> None:
    assert written_names(stored(b"", ({"x": 1}, {"x": 2}), "x")) == {("column", "x"), ("tag", "x")}
    assert written_names(stored(b"", ({"n": 1}, {"n": 2, "m": 3}), "x")) == {
        7: {("column", "x"), ("tag", "n")},
        9: {("column", "x"), ("tag", "n"), ("tag", "m")},
    }
