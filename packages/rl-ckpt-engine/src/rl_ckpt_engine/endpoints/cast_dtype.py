"""Cast floating-point weights before sending, such as float32 master weights to bfloat16."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import numpy as np
import numpy.typing as npt

from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError

CASTS = ("float32", "float16", "bfloat16")
"""Element types to cast to."""
_FROM = (*CASTS, "float64")
_ELEMENTS = 1 << 16
"""Elements per block, so that intermediate results stay in the cache."""


def cast_all(weights: Iterable[WeightTensor], dtype: str) -> Generator[WeightTensor]:
    """Cast each tensor; closing this iterator closes that of `weights`."""
    iterator = iter(weights)
    try:
        for weight in iterator:
            yield cast(weight, dtype)
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


def cast(weight: WeightTensor, dtype: str) -> WeightTensor:
    """Cast a floating-point tensor, rounding to nearest, ties to even; overflow becomes infinity.

    As in torch, float64 is rounded to float32 first, so that a value just beside a tie may be
    rounded as the tie.

    Tensors of integers, bool and 8-bit floats are returned unchanged.
    """
    if weight.dtype == dtype or weight.dtype not in _FROM:
        return weight
    source = weight.data.view(storage_dtype(weight.dtype))
    target = np.empty(source.size, storage_dtype(dtype))
    for start in range(0, source.size, _ELEMENTS):
        part = slice(start, start + _ELEMENTS)
        target[part] = _to(_as_float32(source[part], weight.dtype), dtype)
    return WeightTensor(weight.name, dtype, weight.shape, target.view(np.uint8))


def check_cast(dtype: str) -> None:
    """Check the name of a type to cast to; empty means no cast.

    Raises:
        ConfigError: unknown type; lists the known ones.
    """
    if dtype and dtype not in CASTS:
        raise ConfigError(f"Weights can't be sent as {dtype!r}; use one of {', '.join(CASTS)}, or '' for no cast.")


def _as_float32(part: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return part.astype(np.float32, copy=False)


def _to(part: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    if dtype != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return part.astype(storage_dtype(dtype))
    bits = part.view(np.uint32)
    rounded = bits >> np.uint32(16)  # then in place: each array more takes as long as an operation
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    found = rounded.astype(np.uint16)
    nan = np.isnan(part)
    if nan.any():
        found[nan] = 0x7FC0  # rounding may overflow the payload of a NaN
    return found
