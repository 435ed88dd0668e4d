"""Wire format of BatchData, version 1.

    offset  size  content
    0       4     magic b"RLB1" (the last byte is the version)
    4       4     H, length of the header, little-endian unsigned
    8       H     header, msgpack of `Header`
    ..            zero bytes up to the next multiple of 64, where the payload begins
    P             the buffers, each starting at a multiple of 64 from P, zero bytes between them

* A writer MUST emit the buffers in the order of the header's columns, each column's in the order of
  `Column.buffers`.
* All numbers MUST be little-endian. Offsets in the header count from P.
* The rows of a ragged column are stored with their ragged dimension first; `ragged_dim` is its
  position in the row. It MUST be 0 for other kinds, and a reader MUST treat a missing `ragged_dim`
  as 0.
* A reader MUST refuse another magic, unknown header fields, negative sizes, more than 2**31 - 1
  rows, buffers that overlap or exceed the payload, and sizes that do not match kind, dtype and
  dims. It MUST do so before it allocates memory of any announced size.
* A reader MUST NOT execute or resolve anything in the bytes: there is no pickle, and there are no
  type names beyond `dtypes`.
* Any change to this format requires a new magic.

`encode` returns buffers for scatter/gather I/O; `decode` returns views of its input. Neither copies
column data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import Column, ColumnType, column_type
from rl_protocol.errors import UNREADABLE, BatchError, SchemaError, UnknownNameError, WireError
from rl_protocol.wire.decode_columns import column_from_buffers

MAGIC = b"RLB1"
ALIGN = 64
MAX_ROWS = 2**31 - 1
"""Most rows in one batch."""
_PREFIX = 8

Buffer = bytes | memoryview


class ColumnHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Description of one column; `buffers` holds (offset from P, number of bytes) of each
    buffer."""

    name: str
    kind: str
    dtype: str
    dims: tuple[int, ...]
    buffers: tuple[tuple[int, int], ...]
    ragged_dim: int = 0


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Description of a batch of `rows` rows whose payload takes `payload` bytes."""

    rows: int
    payload: int
    columns: tuple[ColumnHeader, ...]


_decoder = msgspec.msgpack.Decoder(Header)


def aligned(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGN) * ALIGN


def lay_out(rows: int, columns: Iterable[tuple[str, ColumnType, Sequence[int]]]) -> Header:
    """The header that places the buffers of columns (name, type, bytes of each buffer) in a
    payload.

    Raises:
        BatchError: the name of a column is no text that UTF-8 can encode.
    """
    at = 0
    headers: list[ColumnHeader] = []
    for name, (kind, dtype, dims, ragged_dim), sizes in columns:
        if not _is_text(name):
            raise BatchError(
                f"Names of columns must be text that UTF-8 can encode, without lone surrogates; got {name!r}."
            )
        places: list[tuple[int, int]] = []
        for size in sizes:
            places.append((at, size))
            at += aligned(size)
        headers.append(ColumnHeader(name, kind, dtype, dims, tuple(places), ragged_dim))
    return Header(rows, at, tuple(headers))


def _is_text(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def plan(batch: BatchData) -> Header:
    """The header that places each buffer of the batch in a payload; raises what `lay_out`
    raises."""
    return lay_out(
        len(batch),
        (
            (name, column_type(column), [buffer.nbytes for buffer in column.buffers])
            for name, column in batch.columns.items()
        ),
    )


def plan_rows(batch: BatchData, rows: npt.NDArray[np.int64]) -> Header:
    """`plan(batch.select_rows(rows))` without copying the rows."""

    def sizes(column: Column) -> list[int]:
        flat, *offsets = column.buffers
        item = flat.itemsize * math.prod(column.dims)
        if not offsets:
            return [rows.size * item]
        return [int(np.diff(offsets[0])[rows].sum()) * item, offsets[0].itemsize * (rows.size + 1)]

    return lay_out(int(rows.size), ((name, column_type(c), sizes(c)) for name, c in batch.columns.items()))


def write_payload(batch: BatchData, header: Header, target: memoryview) -> None:
    """Copy the buffers of the batch into writable memory of `header.payload` bytes: the only copy
    of a put."""
    out = np.frombuffer(target, dtype=np.uint8)
    for spec in header.columns:
        for (start, size), buffer in zip(spec.buffers, batch[spec.name].buffers, strict=True):
            if size:
                out[start : start + size] = buffer.reshape(-1).view(np.uint8)


def read_payload(header: Header, payload: Buffer, fields: Sequence[str] | None = None) -> BatchData:
    """The batch as views of its payload, with its columns in header order; `fields` selects some of
    them.

    Raises:
        UnknownNameError: the header lacks a field.
        WireError: the header does not match the payload.
    """
    raw = memoryview(payload).cast("B")
    there = {spec.name: None for spec in header.columns}
    unknown = [name for name in fields or () if name not in there]
    if unknown:
        raise UnknownNameError(f"No column {unknown[0]!r} in this payload; it has {', '.join(there) or 'none'}.")
    wanted = there if fields is None else set(fields)
    columns: dict[str, Column] = {}
    for spec in header.columns:
        if spec.name not in wanted:
            continue
        for start, size in spec.buffers:
            if start < 0 or size < 0 or start % ALIGN or start + size > raw.nbytes:
                raise WireError(
                    f"Column {spec.name!r}: buffer at {start} of {size} bytes is not within the payload of {raw.nbytes} bytes."
                )
        if spec.name in columns:
            raise WireError(f"Column {spec.name!r} occurs twice in the header.")
        try:
            views = [raw[start : start + size] for start, size in spec.buffers]
            what = ColumnType(spec.kind, spec.dtype, spec.dims, spec.ragged_dim)
            columns[spec.name] = column_from_buffers(what, header.rows, views)
        except SchemaError as error:
            raise WireError(f"Column {spec.name!r} can't be read: {error}") from error
    return BatchData(columns, header.rows)


def encode(batch: BatchData) -> list[Buffer]:
    """Encode the batch as a list of buffers to write in order; the column buffers are not
    copied."""
    header = plan(batch)
    packed = msgspec.msgpack.encode(header)
    start = aligned(_PREFIX + len(packed))
    head = MAGIC + len(packed).to_bytes(4, "little") + packed
    out: list[Buffer] = [head.ljust(start, b"\0")]
    for spec in header.columns:
        for (_, size), buffer in zip(spec.buffers, batch[spec.name].buffers, strict=True):
            if size:
                out.append(buffer.reshape(-1).view(np.uint8).data)
                out.append(bytes(aligned(size) - size))
    return [part for part in out if len(part)]


def decode(data: Buffer) -> BatchData:
    """Decode a batch; its columns are views of `data`.

    Raises:
        WireError: the bytes are not a batch of this version, or are truncated.
    """
    raw = memoryview(data).cast("B")
    if bytes(raw[:4]) != MAGIC:
        raise WireError(f"Not a batch in wire format {MAGIC!r}: the bytes begin with {bytes(raw[:4])!r}.")
    length = int.from_bytes(raw[4:8], "little")
    start = aligned(_PREFIX + length)
    if raw.nbytes < _PREFIX + length:
        raise WireError(f"Header of {length} bytes announced, {raw.nbytes - _PREFIX} bytes left.")
    try:
        header = _decoder.decode(raw[_PREFIX : _PREFIX + length])
    except UNREADABLE as error:
        raise WireError(f"The header can't be read: {error}.") from error
    if not 0 <= header.rows <= MAX_ROWS or header.payload < 0 or raw.nbytes < start + header.payload:
        raise WireError(
            f"Payload of {header.payload} bytes announced for {header.rows} rows, {raw.nbytes - start} bytes left."
        )
    _check_order(header)
    return read_payload(header, raw[start : start + header.payload])


def _check_order(header: Header) -> None:
    """Refuse overlapping buffers: they would let a small frame describe a large batch."""
    end = 0
    for spec in header.columns:
        for start, size in spec.buffers:
            if start < end:
                raise WireError(
                    f"Column {spec.name!r}: buffer at {start} begins before {end}, where the previous one ends."
                )
            end = max(end, start + size)
