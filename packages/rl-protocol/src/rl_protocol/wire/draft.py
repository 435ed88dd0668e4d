"""Draft: a batch that is filled in place, in memory of the data plane."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import (
    AnyArray,
    Column,
    DenseColumn,
    Offsets,
    RaggedColumn,
    check_offsets,
    offsets_from_lengths,
)
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.batch.schema import ColumnSpec
from rl_protocol.errors import BatchError
from rl_protocol.wire.format import Header, lay_out

_MOST_ITEMS = 1 << 48
"""Most items of a ragged column in a draft: the sizes of such a column fit 64 bits."""


def plan_columns(
    columns: Iterable[ColumnSpec], rows: int, lengths: Mapping[str, Sequence[int]]
) -> tuple[Header, dict[str, Offsets]]:
    """The header of a payload for columns of these sizes, and the offsets of the ragged ones.

    Raises:
        BatchError: rows < 0, an object column, lengths of a column that is not ragged, or not one
            length >= 0 per row.
    """
    specs = {spec.name: spec for spec in columns}
    ragged = {name for name, spec in specs.items() if spec.kind == "ragged"}
    if rows < 0 or set(lengths) != ragged or any(spec.kind == "object" for spec in specs.values()):
        raise BatchError(
            f"alloc needs rows >= 0, no object columns, and lengths of exactly the ragged columns {sorted(ragged)}; "
            f"got {rows} rows, lengths of {sorted(lengths)}, columns {[(s.name, s.kind) for s in specs.values()]}."
        )
    offsets = {name: _offsets(name, rows, lengths[name]) for name in lengths}

    def sizes(spec: ColumnSpec) -> list[int]:
        item = math.prod(spec.dims) * storage_dtype(spec.dtype).itemsize
        return [rows * item] if spec.kind == "dense" else [int(offsets[spec.name][-1]) * item, 8 * (rows + 1)]

    return lay_out(rows, ((s.name, s.type, sizes(s)) for s in specs.values())), offsets


def _offsets(name: str, rows: int, lengths: Sequence[int]) -> Offsets:
    try:
        counts = np.asarray(lengths, dtype=np.int64)
    except OverflowError as error:
        raise BatchError(f"Lengths of column {name!r} must fit int64: {error}.") from error
    if counts.shape != (rows,) or bool((counts < 0).any()):
        raise BatchError(f"Column {name!r} needs {rows} lengths >= 0; got shape {counts.shape}.")
    if rows * int(counts.max(initial=0)) > _MOST_ITEMS and sum(counts.tolist()) > _MOST_ITEMS:
        raise BatchError(f"Column {name!r} can have {_MOST_ITEMS} items at most; got {sum(counts.tolist())}.")
    offsets = offsets_from_lengths(counts)
    return check_offsets(offsets, int(offsets[-1]))


class Draft:
    """Columns of a fixed layout over writable memory. Get one from `DataPlane.alloc`, fill it, pass
    it to `put`.

    A draft is open until `put` or `discard`; afterwards its arrays MUST NOT be written to.

    >>> import numpy as np
    >>> from rl_protocol import ColumnSpec
    >>> header, offsets = plan_columns([ColumnSpec(name="x", kind="dense", dtype="int64")], 3, {})
    >>> draft = Draft(header, offsets, np.zeros(header.payload, np.uint8))
    >>> draft["x"][:] = [1, 2, 3]
    >>> draft.batch().dense("x").values.tolist()
    [1, 2, 3]
    """

    def __init__(
        self,
        header: Header,
        offsets: Mapping[str, Offsets],
        memory: AnyArray,
        on_discard: Callable[[], None] | None = None,
    ) -> None:
        self.header = header
        self._offsets = offsets
        self._on_discard = on_discard
        self._arrays: dict[str, AnyArray] = {}
        self._open = True
        for column in header.columns:
            (start, size), *rest = column.buffers
            raw = memory[start : start + size].view(storage_dtype(column.dtype))
            items = header.rows if not rest else int(offsets[column.name][-1])
            self._arrays[column.name] = raw.reshape((items, *column.dims))
            for at, length in rest:
                memory[at : at + length].view(np.int64)[:] = offsets[column.name]

    def __len__(self) -> int:
        return self.header.rows

    def __getitem__(self, name: str) -> AnyArray:
        """The writable values of a column: [N, *dims] if dense, [sum of lengths, *dims] if ragged.

        Raises:
            BatchError: there is no such column, or the draft is closed.
        """
        self._check_open()
        if name not in self._arrays:
            raise BatchError(f"This draft has no column {name!r}; it has {', '.join(self._arrays)}.")
        return self._arrays[name]

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def batch(self) -> BatchData:
        """The current contents as read-only views."""
        self._check_open()
        columns: dict[str, Column] = {}
        for spec in self.header.columns:
            values = self._arrays[spec.name]
            columns[spec.name] = (
                DenseColumn(values, spec.dtype)
                if spec.kind == "dense"
                else RaggedColumn(values, self._offsets[spec.name], spec.dtype, spec.ragged_dim)
            )
        return BatchData(columns, self.header.rows)

    def close(self) -> None:
        """Close the draft after a plane has taken its memory."""
        self._check_open()
        self._open = False
        self._on_discard = None
        self._arrays = {}

    def discard(self) -> None:
        """Return the memory unused; no effect if the draft is closed."""
        on_discard, self._on_discard = self._on_discard, None
        if self._open:
            self._open = False
            self._arrays = {}
            if on_discard is not None:
                on_discard()

    def _check_open(self) -> None:
        if not self._open:
            raise BatchError("This draft was put or discarded already; alloc another one.")
