"""The wire format: round trips, golden bytes, views, and errors for malformed frames."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import (
    BatchData,
    BatchError,
    Column,
    DenseColumn,
    ObjectColumn,
    RaggedColumn,
    UnknownNameError,
    WireError,
    dense,
    ragged,
    wire,
)
from rl_protocol.batch.columns import column_type
from rl_protocol.batch.dtypes import STORAGE_DTYPES

GOLDEN = BatchData(
    {
        "score": dense(np.array([1.0, -2.0], np.float32)),
        "ids": ragged([[5, 6], [7]], "int32"),
        "note": ObjectColumn.from_values(["a", None]),
    }
)
GOLDEN_HEX = (
    "524c42315d00000093 02 cd0140 93"
    "96 a573636f7265 a564656e7365 a7666c6f61743332 90 91 92 00 08 00"
    "96 a3696473 a6726167676564 a5696e743332 90 92 92 40 0c 92 cc80 18 00"
    "96 a46e6f7465 a66f626a656374 a66f626a656374 90 92 92 ccc0 03 92 cd0100 18 00"
).replace(" ", "")
GOLDEN_PAYLOAD = (
    "0000803f000000c0".ljust(128, "0")
    + "050000000600000007000000".ljust(128, "0")
    + "000000000000000002000000000000000300000000000000".ljust(128, "0")
    + "a161c0".ljust(128, "0")
    + "000000000000000002000000000000000300000000000000".ljust(128, "0")
)


@st.composite
def columns(draw: st.DrawFn, rows: int) -> Column:
    kind = draw(st.sampled_from(["dense", "ragged", "object"]))
    if kind == "object":
        return ObjectColumn.from_values(draw(st.lists(st.text(max_size=4) | st.none(), min_size=rows, max_size=rows)))
    dtype = draw(st.sampled_from(sorted(STORAGE_DTYPES)))
    store = STORAGE_DTYPES[dtype]
    dims = draw(st.lists(st.integers(0, 3), max_size=2))

    def values(count: int) -> np.ndarray[Any, Any]:
        size = int(np.prod([count, *dims])) * store.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
        if dtype == "bool":
            raw = bytes(b & 1 for b in raw)
        return np.frombuffer(raw, store).reshape(count, *dims) if size else np.zeros((count, *dims), store)

    if kind == "dense":
        return DenseColumn(values(rows), dtype)
    lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return RaggedColumn(values(sum(lengths)), np.cumsum([0, *lengths]), dtype, draw(st.integers(0, len(dims))))


@st.composite
def batches(draw: st.DrawFn) -> BatchData:
    rows = draw(st.integers(0, 4))
    names = draw(st.lists(st.text(max_size=4), unique=True, max_size=4))
    return BatchData({name: draw(columns(rows)) for name in names}, rows)


def same(a: BatchData, b: BatchData) -> bool:
    def facts(batch: BatchData) -> list[Any]:
        return [
            (n, column_type(c), [(x.dtype, x.shape, x.tobytes()) for x in c.buffers]) for n, c in batch.columns.items()
        ]

    return len(a) == len(b) and facts(a) == facts(b)


@given(batches())
def test_round_trip(batch: BatchData):
    assert same(wire.decode(b"".join(wire.encode(batch))), batch)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_round_trip_of_every_element_type(dtype: str, kind: str):
    values = np.arange(6).astype(STORAGE_DTYPES[dtype])
    column = DenseColumn(values, dtype) if kind == "dense" else RaggedColumn(values, np.array([0, 4, 4, 6]), dtype)
    batch = BatchData({"x": column})
    again = wire.decode(b"".join(wire.encode(batch)))
    assert same(again, batch)
    assert again["x"].dtype == dtype


def test_golden_bytes():
    encoded = b"".join(wire.encode(GOLDEN))
    header = bytes.fromhex(GOLDEN_HEX)
    assert encoded[: len(header)].hex() == header.hex()
    start = wire.aligned(len(header))
    assert not any(encoded[len(header) : start])
    assert encoded[start:].hex() == GOLDEN_PAYLOAD
    assert same(wire.decode(header.ljust(start, b"\0") + bytes.fromhex(GOLDEN_PAYLOAD)), GOLDEN)


@given(batches())
def test_payload_and_buffers_are_aligned(batch: BatchData):
    header = wire.plan(batch)
    parts = wire.encode(batch)
    assert len(parts[0]) % wire.ALIGN == 0
    assert sum(len(part) for part in parts[1:]) == header.payload
    assert header.payload % wire.ALIGN == 0
    end = 0
    for column in header.columns:
        for start, size in column.buffers:
            assert start % wire.ALIGN == 0
            assert start >= end
            end = start + size
    assert end <= header.payload


def test_encode_does_not_copy_and_decode_does_not_copy():
    batch = BatchData({"a": dense(np.arange(2.0)), "b": ragged([[1, 2], [3]], "int64")})
    parts = [np.frombuffer(p, np.uint8) for p in wire.encode(batch)]
    for column in batch.columns.values():
        assert all(any(np.shares_memory(buffer, part) for part in parts) for buffer in column.buffers)
    raw = bytearray(b"".join(wire.encode(batch)))
    memory = np.frombuffer(raw, np.uint8)
    for column in wire.decode(memoryview(raw)).columns.values():
        for buffer in column.buffers:
            assert np.shares_memory(buffer, memory)
            assert not buffer.flags.writeable


def test_write_payload_and_read_payload_are_inverse():
    header = wire.plan(GOLDEN)
    memory = bytearray(header.payload)
    wire.write_payload(GOLDEN, header, memoryview(memory))
    assert memory.hex() == GOLDEN_PAYLOAD
    assert same(wire.read_payload(header, memoryview(memory)), GOLDEN)
    assert wire.read_payload(header, memoryview(memory), ["ids"]).field_names == ("ids",)


def test_read_payload_refuses_columns_that_are_not_there():
    header = wire.plan(GOLDEN)
    memory = bytearray(header.payload)
    with pytest.raises(UnknownNameError, match="No column 'idz' in this payload; it has score, ids, note"):
        wire.read_payload(header, memoryview(memory), ["ids", "idz"])


def test_reading_many_columns_looks_at_each_name_once():
    """Regression: searching the requested names for each of 4,000 columns took over a second."""
    looked = 0

    class Names(tuple):
        def __contains__(self, name: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(name)

    batch = BatchData({f"c{i}": dense([float(i)]) for i in range(50)})
    header = wire.plan(batch)
    payload = bytearray(header.payload)
    wire.write_payload(batch, header, memoryview(payload))
    got = wire.read_payload(header, payload, Names(batch.field_names[10:]))
    assert got.field_names == batch.field_names[10:]
    assert looked == 0


def test_a_header_without_ragged_dimensions_reads_as_ragged_first():
    """Old headers have five fields per column and no ragged dimension."""
    old = [1, 128, [["a", "ragged", "int8", [], [[0, 1], [64, 16]]]]]
    batch = wire.decode(with_header(old, bytes(64) + np.array([0, 1]).tobytes().ljust(64, b"\0")))
    assert (batch.ragged("a").ragged_dim, batch.ragged("a").lengths.tolist()) == (0, [1])


def reads(data: bytes) -> None:
    """Decode and read every value; the only error may be WireError."""
    try:
        batch = wire.decode(data)
        for column in batch.columns.values():
            for i in range(min(len(column), 100)):
                column.row(i)
    except WireError:
        return


@given(batches(), st.data())
def test_every_truncation_is_a_wire_error(batch: BatchData, data: st.DataObject):
    encoded = b"".join(wire.encode(batch))
    with pytest.raises(WireError):
        wire.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_every_truncation_of_the_golden_bytes_is_a_wire_error():
    encoded = b"".join(wire.encode(GOLDEN))
    for size in range(len(encoded)):
        with pytest.raises(WireError):
            wire.decode(encoded[:size])


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(raw: bytes):
    with pytest.raises(WireError):
        wire.decode(raw)
    reads(wire.MAGIC + raw)
    reads(wire.MAGIC + len(raw).to_bytes(4, "little") + raw)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_a_batch_or_a_wire_error(changes: list[tuple[int, int]]):
    encoded = bytearray(b"".join(wire.encode(GOLDEN)))
    for at, value in changes:
        encoded[at % len(encoded)] = value
    reads(bytes(encoded))


NUMBERS = st.integers(-2, 200) | st.sampled_from([2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)])
HEADERS = st.tuples(
    NUMBERS,
    NUMBERS,
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["dense", "ragged", "object", "x"]),
            st.sampled_from(["int8", "int64", "object", "x"]),
            st.lists(NUMBERS, max_size=3) | st.just([0] * 70),
            st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3),
        ),
        max_size=2,
    ),
)


def with_header(header: object, payload: bytes) -> bytes:
    packed = msgspec.msgpack.encode(header)
    head = wire.MAGIC + len(packed).to_bytes(4, "little") + packed
    return head.ljust(wire.aligned(len(head)), b"\0") + payload


@given(HEADERS, st.sampled_from([b"", bytes(64), bytes(range(128))]))
def test_well_formed_headers_that_lie_are_a_batch_or_a_wire_error(header: object, payload: bytes):
    reads(with_header(header, payload))


@pytest.mark.parametrize(
    ("rows", "payload", "column", "message"),
    [
        (2**64 - 1, 0, None, "announced for 18446744073709551615 rows"),
        (-1, 0, None, "announced for -1 rows"),
        (1, -5, None, "Payload of -5 bytes"),
        (1, 999, None, "Payload of 999 bytes announced"),
        (1, 64, ["a", "dense", "int8", [], [[1, 1]]], "buffer at 1 of 1 bytes is not within"),
        (1, 64, ["a", "dense", "int8", [], [[64, 1]]], "buffer at 64 of 1 bytes is not within"),
        (1, 64, ["a", "dense", "int8", [], [[0, 2]]], "has 1 bytes; got 2"),
        (1, 64, ["a", "dense", "int8", [-1], [[0, 1]]], "has -1 bytes; got 1"),
        (1, 64, ["a", "dense", "int8", [2**32, 2**32], [[0, 0]]], "has 18446744073709551616 bytes"),
        (1, 64, ["a", "dense", "int8", [2**62, 0, 2**62], [[0, 0]]], "No int8 array"),
        (1, 64, ["a", "dense", "int9", [], [[0, 1]]], "Unknown element type"),
        (1, 64, ["a", "tree", "int8", [], [[0, 1]]], r"kind 'tree'|has 2 buffer"),
        (1, 128, ["a", "object", "int8", [], [[0, 1], [64, 16]]], "dtype 'object'"),
        (1, 128, ["a", "ragged", "int8", [], [[0, 1], [64, 16]]], "start at 0"),
        (1, 128, ["a", "ragged", "int8", [], [[64, 1], [0, 16]]], "buffer at 0 begins before 65"),
        (1, 64, ["a", "dense", "int8", [], [[0, 1]], 1], "Only ragged columns have a ragged dimension"),
        (1, 128, ["a", "ragged", "int8", [], [[0, 1], [64, 16]], -1], "ragged in dimension 0..0; got -1"),
        (1, 64, ["a", "dense", "int8", [], [[0, 1]], 0, 1], "at most length 6|length"),
    ],
)
def test_lies_are_named(rows: int, payload: int, column: list[Any] | None, message: str):
    data = with_header([rows, payload, [] if column is None else [column]], b"\1" * 128)
    with pytest.raises(WireError, match=message):
        wire.decode(data)


def test_other_formats_versions_and_double_columns_are_refused():
    with pytest.raises(WireError, match="begin with b'RLB2'"):
        wire.decode(b"RLB2" + bytes(60))
    column = ["a", "dense", "int8", [], [[0, 1]]]
    with pytest.raises(WireError, match="'a' occurs twice"):
        wire.decode(with_header([1, 128, [column, [*column[:4], [[64, 1]]]]], bytes(128)))
    with pytest.raises(WireError, match="header can't be read"):
        wire.decode(with_header([1, 0, [["\udcff".encode("utf-8", "surrogatepass"), "dense", "int8", [], []]]], b""))
    with pytest.raises(WireError, match="header can't be read"):
        wire.decode(b"RLB1\x05\0\0\0" + b"\x93\x01\x00\x91\xff" + bytes(64))


def test_a_column_whose_name_is_no_text_is_refused():
    batch = BatchData({"x": dense(np.zeros(1)), "a\ud800": dense(np.zeros(1))})
    with pytest.raises(BatchError, match=r"Names of columns .* got 'a\\ud800'"):
        wire.encode(batch)
    with pytest.raises(BatchError, match=r"Names of columns .* got 7"):
        wire.encode(BatchData({7: dense(np.zeros(1))}))  # type: ignore[dict-item]


def test_bad_text_in_the_header_is_a_wire_error():
    good = with_header([0, 0, [["ab", "dense", "int8", [], [[0, 0]]]]], b"")
    with pytest.raises(WireError, match="header can't be read"):
        wire.decode(good.replace(b"\xa2ab", b"\xa2\xff\xfe"))


def test_bytes_beyond_the_payload_are_left_alone():
    encoded = b"".join(wire.encode(GOLDEN))
    assert same(wire.decode(encoded + b"more"), GOLDEN)
