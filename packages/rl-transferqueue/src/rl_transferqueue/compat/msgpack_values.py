"""Encode non-tensor values and tags as msgpack, where 0.1.11 uses pickle.

A value is None, a bool, number, string, bytes, tensor or array, or a list, tuple or dict of such
values. Tuples become lists and numpy scalars become Python numbers. Other values are refused.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch

from rl_protocol.batch.dtypes import dtype_name, storage_dtype
from rl_protocol.batch.kv_batch_meta import Tag
from rl_protocol.errors import UNREADABLE, SchemaError, WireError
from rl_protocol.torch import to_array, to_tensor

_TENSOR, _ARRAY = 1, 2
"""Codes of msgpack extensions."""
_PLAIN = (bool, int, float, str, bytes, bytearray, type(None))
_PACKED = "\x00"
"""First character of a tag whose value the plane can't hold; base64 of its msgpack follows."""


def pack(value: Any) -> Any:
    """The value with tensors and arrays as msgpack extensions.

    Raises:
        SchemaError: the value, or a part of it, can't be stored.
    """
    if isinstance(value, torch.Tensor):
        array, dtype = to_array(value)
        return _extension(_TENSOR, (dtype, tuple(value.shape), np.ascontiguousarray(array).tobytes()))
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OSU":
            return pack(value.tolist())
        return _extension(_ARRAY, (dtype_name(value), value.shape, np.ascontiguousarray(value).tobytes()))
    if isinstance(value, np.generic):
        return pack(value.item())
    if isinstance(value, list | tuple):
        return [pack(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, Mapping):
        return {_key(key): pack(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise SchemaError(f"The number {value} can't be stored; integers have at most 64 bits.")
    if isinstance(value, _PLAIN):
        return value
    raise SchemaError(
        f"A {type(value).__name__} can't be stored, because nothing is pickled. Store numbers, strings, bytes, tensors, "
        "arrays, and lists, tuples and dicts of them."
    )


def _key(key: Any) -> Any:
    plain = key.item() if isinstance(key, np.generic) else key
    if not isinstance(plain, bool | int | float | str | bytes | None):
        raise SchemaError(f"A dict with a key of type {type(key).__name__} can't be stored; use strings or numbers.")
    return plain


def _extension(kind: int, value: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(value))


def unpack(value: Any) -> Any:
    """The inverse of `pack`; tensors and arrays are writable."""
    if isinstance(value, msgspec.msgpack.Ext):
        return _unpack_extension(value.code, bytes(memoryview(value.data)))
    if isinstance(value, list):
        return [unpack(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: unpack(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _unpack_extension(kind: int, data: bytes) -> Any:
    dtype, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytearray])
    array = np.frombuffer(raw, storage_dtype(dtype)).reshape(shape)
    return to_tensor(array, dtype) if kind == _TENSOR else array


def pack_tag(tag: Mapping[str, Any]) -> Tag:
    """Tags in the form that the plane stores.

    A tensor or array of one number becomes a number; lists and dicts become text.

    Raises:
        SchemaError: a value can't be stored; the message names the tag.
    """
    out: dict[str, Any] = {}
    for name, value in tag.items():
        try:
            out[name] = _packed_tag(value)
        except SchemaError as error:
            raise SchemaError(f"Tag {name!r}: {error.message}") from error
    return out


def _packed_tag(value: Any) -> Any:
    if _is_plain(value):  # the common case, on the hot path of a put
        return value
    if isinstance(value, torch.Tensor | np.ndarray) and not value.ndim:
        value = value.item()
    value = pack(value)
    return value if _is_plain(value) else _PACKED + base64.b64encode(msgspec.msgpack.encode(value)).decode()


def _is_plain(value: Any) -> bool:
    """Whether a tag of the plane can hold the value unchanged."""
    kind = type(value)
    if kind is str:
        return not value.startswith(_PACKED)
    return kind is float or kind is bool or value is None or (kind is int and -(1 << 63) <= value < 1 << 63)


def unpack_tag(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `pack_tag`.

    Raises:
        WireError: `pack_tag` did not write this tag.
    """
    out = dict(tag)
    for name, value in tag.items():
        if isinstance(value, str) and value.startswith(_PACKED):
            out[name] = _unpacked(name, value[len(_PACKED) :])
    return out


def _unpacked(name: str, text: str) -> Any:
    try:
        return unpack(msgspec.msgpack.decode(base64.b64decode(text, validate=True)))
    except (*UNREADABLE, ValueError) as error:
        raise WireError(f"Tag {name!r} was not written by this API: {error}.") from error
