"""Pack arrays of different shapes, such as images, into a column of elements and one of shapes.

    images         ragged uint8          row i: the elements of all its arrays in C order
    images.shapes  ragged int64 [ndim]   row i: one shape per array

A row may have any number of arrays, including none. All arrays of a column share element type and
number of dimensions. `schema.LengthIsProduct` states the law between the two columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray, RaggedColumn, offsets_from_lengths
from rl_protocol.batch.dtypes import dtype_name, storage_dtype
from rl_protocol.errors import SchemaError

SHAPES_SUFFIX = ".shapes"


def pack_arrays(
    name: str, rows: Sequence[Sequence[AnyArray]], *, ndim: int, dtype: str | None = None
) -> dict[str, RaggedColumn]:
    """Pack N rows of arrays into two columns.

    Examples:
        >>> columns = pack_arrays("images", [[np.zeros((2, 3, 3), np.uint8)], []], ndim=3)
        >>> [(name, column.lengths.tolist()) for name, column in columns.items()]
        [('images', [18, 0]), ('images.shapes', [1, 0])]

    Args:
        name: name of the column of elements; the column of shapes is `name.shapes`.
        rows: [N] lists of arrays.
        ndim: number of dimensions of every array.
        dtype: element type, needed if numpy lacks it (bfloat16, fp8) or if there are no arrays;
            defaults to that of the arrays, or uint8 if there are none.

    Raises:
        SchemaError: the arrays differ in element type or number of dimensions; names the row.
    """
    first = next((array for row in rows for array in row), None)
    dtype = dtype or ("uint8" if first is None else dtype_name(first))
    for i, row in enumerate(rows):
        for array in row:
            if array.ndim != ndim or array.dtype != storage_dtype(dtype):
                raise SchemaError(
                    f"Row {i} of {name!r}: expected arrays of {ndim} dimensions stored as {storage_dtype(dtype).name}, got "
                    f"{array.dtype.name} of shape {array.shape}."
                )
    flat = [array.reshape(-1) for row in rows for array in row]
    shapes = [array.shape for row in rows for array in row]
    return {
        name: RaggedColumn(
            np.concatenate(flat) if flat else np.zeros(0, storage_dtype(dtype)),
            offsets_from_lengths([sum(array.size for array in row) for row in rows]),
            dtype,
        ),
        name + SHAPES_SUFFIX: RaggedColumn(
            np.array(shapes, np.int64).reshape(-1, ndim), offsets_from_lengths([len(row) for row in rows]), "int64"
        ),
    }


def unpack_arrays(batch: BatchData, name: str) -> list[list[AnyArray]]:
    """The arrays of every row, as views of the column.

    Raises:
        UnknownNameError: one of the two columns is missing.
        SchemaError: the shapes do not match the number of elements; names the row.
    """
    values, shapes = batch.ragged(name), batch.ragged(name + SHAPES_SUFFIX)
    out: list[list[AnyArray]] = []
    for i in range(len(batch)):
        row, at = values.row(i), 0
        arrays: list[AnyArray] = []
        for shape in shapes.row(i).tolist():
            size = math.prod(shape)
            if min(shape, default=0) < 0 or at + size > row.size:
                raise SchemaError(
                    f"Row {i} of {name!r} has {row.size} elements, too few for shapes {shapes.row(i).tolist()}."
                )
            arrays.append(row[at : at + size].reshape(shape))
            at += size
        if at != row.size:
            raise SchemaError(f"Row {i} of {name!r} has {row.size} elements; its shapes say {at}.")
        out.append(arrays)
    return out
