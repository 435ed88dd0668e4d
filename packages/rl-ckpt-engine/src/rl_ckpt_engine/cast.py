"""Other element types on the way: a trainer keeps float32 master weights, rollout takes bfloat16."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import numpy as np
import numpy.typing as npt

from rl_protocol.dtypes import storage_dtype
from rl_protocol.errors import ConfigError
from rl_protocol.weights import WeightTensor

CASTS = ("float32", "float16", "bfloat16")
"""Types to cast to."""
_FROM = (*CASTS, "float64")
_ELEMENTS = 1 << 18
"""Worked on at once, so that intermediate results stay in the cache."""


def cast_all(weights: Iterable[WeightTensor], dtype: str) -> Generator[WeightTensor]:
    """Each tensor as `cast` makes it; the iterator of `weights` is closed with this one."""
    iterator = iter(weights)
    try:
        for weight in iterator:
            yield cast(weight, dtype)
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


def cast(weight: WeightTensor, dtype: str) -> WeightTensor:
    """The tensor with elements of that type, rounded to nearest, ties to even; what overflows becomes infinite. Tensors of integers, bool and
    8-bit floats stay as they are."""
    if weight.dtype == dtype or weight.dtype not in _FROM:
        return weight
    source = weight.data.view(storage_dtype(weight.dtype))
    target = np.empty(source.size, storage_dtype(dtype))
    for start in range(0, source.size, _ELEMENTS):
        part = slice(start, start + _ELEMENTS)
        target[part] = _to(_as_float32(source[part], weight.dtype), dtype)
    return WeightTensor(weight.name, dtype, weight.shape, target.view(np.uint8))


def check_cast(dtype: str) -> None:
    """Refuse what nothing can be cast to; empty stands for no cast.

    Raises:
        ConfigError: names what there is.
    """
    if dtype and dtype not in CASTS:
        raise ConfigError(f"Weights can't be sent as {dtype!r}; there are {', '.join(CASTS)}, or '' for as they are.")


def _as_float32(part: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return part.astype(np.float32)


def _to(part: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    if dtype != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return part.astype(storage_dtype(dtype))
    bits = part.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(part)] = 0x7FC0  # rounding may carry out of the payload of a NaN
    return rounded
