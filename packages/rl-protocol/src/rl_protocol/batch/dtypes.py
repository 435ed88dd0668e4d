"""Element types by name; bfloat16 and fp8, which numpy lacks, are stored as integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_protocol.errors import SchemaError

STORAGE_DTYPES: dict[str, np.dtype[np.generic]] = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}
"""Name of each element type -> the numpy dtype whose bytes hold it."""


def storage_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype that stores elements of type `name`.

    Raises:
        SchemaError: the name is unknown.
    """
    try:
        return STORAGE_DTYPES[name]
    except KeyError:
        raise SchemaError(f"Unknown element type {name!r}; known are {', '.join(STORAGE_DTYPES)}.") from None


def dtype_name(array: npt.NDArray[np.generic]) -> str:
    """The name of a numpy array's element type.

    Raises:
        SchemaError: the dtype is not supported (objects, strings, structured, big-endian).
    """
    name = array.dtype.name
    if STORAGE_DTYPES.get(name) != array.dtype:
        raise SchemaError(
            f"Arrays of dtype {array.dtype!r} can't be stored; use one of {', '.join(STORAGE_DTYPES)}, "
            "or an ObjectColumn for strings and records."
        )
    return name
