"""WeightTensor: one named model weight in host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_protocol.batch.columns import frozen
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.errors import SchemaError


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """One named tensor in host memory.

    Attributes:
        name: parameter name in the model's Hugging Face checkpoint.
        dtype: element type (see rl_protocol.batch.dtypes).
        shape: any shape, including scalars and empty tensors.
        data: uint8 [nbytes], C order, little-endian; read-only, because it may be shared.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        want = storage_dtype(self.dtype).itemsize * math.prod(self.shape)
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or self.data.nbytes != want:
            raise SchemaError(
                f"Weight {self.name!r} of type {self.dtype} and shape {self.shape} needs a flat uint8 array of {want} bytes; "
                f"got {self.data.dtype} {self.data.shape}."
            )
        object.__setattr__(self, "data", frozen(self.data))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
