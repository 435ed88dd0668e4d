"""BatchMeta of TransferQueue 0.1.11: mutable, made of lists, and picklable for Ray."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from rl_protocol.errors import BatchError
from rl_transferqueue.compat.errors import FieldNotFoundError
from rl_transferqueue.compat.metadata.kv_batch_meta import Meta, check_order, chunk_spans, merge_extra

Schema: TypeAlias = dict[str, Any]
"""A field's dtype, shape (of a row), is_nested, is_non_tensor; per_sample_shapes if rows differ."""


def extract_field_schema(data: TensorDict) -> dict[str, Schema]:
    """dtype and shape of every field of a TensorDict of batch size [N]; none for N = 0.

    Raises:
        BatchError: a field whose first dimension is not N.
    """
    rows = int(data.batch_size[0])
    return {str(name): _schema_of(str(name), data.get(name), rows) for name in data.keys()} if rows else {}  # noqa: SIM118


def _schema_of(name: str, value: Any, rows: int) -> Schema:
    if not isinstance(value, torch.Tensor):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    if value.is_nested:
        shapes = [tuple(row.shape) for row in value.unbind()]
        first = torch.Size(shapes[0])
        schema: Schema = {"dtype": value.dtype, "shape": first, "is_nested": True, "is_non_tensor": False}
        schema["per_sample_shapes"] = shapes
        size = len(shapes)
    else:
        shape = value.shape[1:] if value.dim() > 1 else torch.Size((1,))
        schema, size = (
            {"dtype": value.dtype, "shape": shape, "is_nested": False, "is_non_tensor": False},
            value.shape[0],
        )
    if size != rows:
        raise BatchError(f"Field {name!r} has {size} rows, the batch has {rows}.")
    return schema


class SampleView:
    """One row of a BatchMeta, read-only."""

    def __init__(self, batch: BatchMeta, row: int) -> None:
        self._batch = batch
        self._row = row

    @property
    def global_index(self) -> int:
        return self._batch.global_indexes[self._row]

    @property
    def partition_id(self) -> str:
        return self._batch.partition_ids[self._row]

    @property
    def production_status(self) -> int:
        return int(self._batch.production_status[self._row])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._row])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """Schema by field; `shape` is this row's."""
        out: dict[str, Mapping[str, Any]] = {}
        for name, schema in self._batch.field_schema.items():
            own = {fact: value for fact, value in schema.items() if fact != "per_sample_shapes"}
            if schema.get("per_sample_shapes") is not None:
                own["shape"] = schema["per_sample_shapes"][self._row]
            out[name] = MappingProxyType(own)
        return MappingProxyType(out)


class SampleViews(Sequence[SampleView]):
    """The rows of a BatchMeta, made on access."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, row: Any) -> Any:
        return SampleView(self._batch, range(len(self))[row])

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, row) for row in range(len(self)))


class BatchMeta:
    """The global indexes of N rows and the schema of their fields.

    Args:
        global_indexes: [N] numbers of the rows, never reused.
        partition_ids: [N] partition of each row.
        field_schema: schema by field.
        production_status: int8 [N], 1 for a row that has all fields; default: all 0.
        extra_info: metadata of the batch.
        custom_meta: [N] tags.
        _custom_backend_meta: [N] metadata for the storage: the key of the row.

    Raises:
        BatchError: a list does not have N elements.
    """

    def __init__(
        self,
        global_indexes: list[int],
        partition_ids: list[str],
        field_schema: dict[str, Schema] | None = None,
        production_status: npt.NDArray[np.int8] | None = None,
        extra_info: Meta | None = None,
        custom_meta: list[Meta] | None = None,
        _custom_backend_meta: list[Meta] | None = None,
    ) -> None:
        size = len(global_indexes)
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema: dict[str, Schema] = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        self.production_status: npt.NDArray[np.int8] = (
            np.zeros(size, np.int8) if production_status is None else np.array(production_status, np.int8)
        )
        self.extra_info: Meta = dict(extra_info or {})
        self.custom_meta: list[Meta] = [dict(m) for m in custom_meta] if custom_meta else [{} for _ in range(size)]
        self._custom_backend_meta: list[Meta] = (
            [dict(m) for m in _custom_backend_meta] if _custom_backend_meta else [{} for _ in range(size)]
        )
        lengths = {
            "partition_ids": len(self.partition_ids),
            "production_status": len(self.production_status),
            "custom_meta": len(self.custom_meta),
            "_custom_backend_meta": len(self._custom_backend_meta),
        } | {
            f"per_sample_shapes of {name!r}": len(schema["per_sample_shapes"])
            for name, schema in self.field_schema.items()
            if schema.get("per_sample_shapes") is not None
        }
        for what, length in lengths.items():
            if length != size:
                raise BatchError(f"BatchMeta of {size} rows: {what} has {length}.")

    @property
    def backend_meta(self) -> list[Meta]:
        """[N] metadata for the storage."""
        return self._custom_backend_meta

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.production_status = np.array(self.production_status)  # arrays from Ray are read-only

    # -- reading
    @property
    def size(self) -> int:
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        """Sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all of them have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> SampleViews:
        return SampleViews(self)

    def _schema(self, field_name: str) -> Schema:
        try:
            return self.field_schema[field_name]
        except KeyError:
            raise FieldNotFoundError(f"No field {field_name!r} in this batch; it has {self.field_names}.") from None

    def get_dtypes(self, field_name: str) -> list[Any]:
        """[N] dtype of each row."""
        return [self._schema(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """[N] shape of each row."""
        schema = self._schema(field_name)
        return list(schema.get("per_sample_shapes") or [schema.get("shape")] * self.size)

    def __str__(self) -> str:
        return f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, extra_info={self.extra_info})"

    # -- extra_info and custom_meta
    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def get_all_extra_info(self) -> Meta:
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: Meta) -> None:
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[Meta]:
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: list[Meta] | None) -> None:
        """Merge one dict of tags into each row; `set_custom_meta` or `put` stores them."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise BatchError(f"custom_meta needs one dict per row: {self.size} rows, {len(custom_meta)} dicts.")
        for tags, new in zip(self.custom_meta, custom_meta, strict=True):
            tags.update(new)

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in range(self.size)]

    # -- fields
    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of a TensorDict of N rows to this batch, in place, and return it."""
        rows = int(tensor_dict.batch_size[0])
        if rows not in (0, self.size):
            raise BatchError(f"add_fields: this batch has {self.size} rows, the TensorDict {rows}.")
        if rows:
            self.field_schema.update(extract_field_schema(tensor_dict))
            if set_all_ready:
                self.production_status[:] = 1
        return self

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """The same rows with these fields only.

        Raises:
            FieldNotFoundError: there is no such field (0.1.11 drops it silently).
        """
        out = self.copy()
        out.field_schema = {name: copy.deepcopy(self._schema(name)) for name in field_names}
        return out

    # -- rows
    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """The rows at these places of the batch."""
        rows = [int(row) for row in sample_indices]
        if any(not 0 <= row < self.size for row in rows):
            raise BatchError(f"Row numbers must be in 0..{self.size - 1}; got {rows[:8]}.")
        schema = copy.deepcopy(self.field_schema)
        for facts in schema.values():
            if facts.get("per_sample_shapes") is not None:
                facts["per_sample_shapes"] = [facts["per_sample_shapes"][row] for row in rows]
        return BatchMeta(
            [self.global_indexes[row] for row in rows],
            [self.partition_ids[row] for row in rows],
            schema,
            self.production_status[rows],
            copy.deepcopy(self.extra_info),
            copy.deepcopy([self.custom_meta[row] for row in rows]),
            copy.deepcopy([self._custom_backend_meta[row] for row in rows]),
        )

    def copy(self) -> BatchMeta:
        """A deep copy."""
        return self.select_samples(range(self.size))

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self.select_samples(range(self.size)[item])
        return self.select_samples([range(self.size)[item]])

    def reorder(self, indices: list[int]) -> None:
        """Reorder the rows in place."""
        check_order(indices, self.size)
        self.__dict__.update(self.select_samples(indices).__dict__)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Exactly `chunks` consecutive parts whose sizes differ by at most one."""
        return [self[slice(*span)] for span in chunk_spans(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One part per partition."""
        rows: dict[str, list[int]] = {}
        for row, partition in enumerate(self.partition_ids):
            rows.setdefault(partition, []).append(row)
        return [self.select_samples(part) for part in rows.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same rows with the fields of both; `other` takes precedence.

        A row is ready if it is ready in both.
        """
        if not self.size or not other.size:
            return (self if self.size else other).copy()
        if (self.global_indexes, self.partition_ids) != (other.global_indexes, other.partition_ids):
            raise BatchError("BatchMeta.union needs the same global_indexes and partition_ids in the same order.")
        out, theirs = self.copy(), other.copy()
        out.field_schema |= theirs.field_schema
        out.production_status &= theirs.production_status
        out.extra_info |= theirs.extra_info
        out.update_custom_meta(theirs.custom_meta)
        return out

    @classmethod
    def concat(cls, data: list[BatchMeta], validate: bool = True) -> BatchMeta:
        """Rows of all parts in order; empty parts are ignored.

        Raises:
            BatchError: parts disagree about extra_info, or with `validate` about fields or dtypes.
        """
        parts = [part for part in data if part.size]
        if not parts:
            return cls.empty()
        first = parts[0]
        for number, part in enumerate(parts if validate else []):
            dtypes = {name: part.field_schema[name].get("dtype") for name in part.field_names}
            expected = {name: first.field_schema[name].get("dtype") for name in first.field_names}
            if dtypes != expected:
                raise BatchError(f"BatchMeta.concat: part {number} has the fields {dtypes}, part 0 has {expected}.")
        return cls(
            [index for part in parts for index in part.global_indexes],
            [partition for part in parts for partition in part.partition_ids],
            {name: _concat_schema(name, parts) for name in first.field_schema},
            np.concatenate([part.production_status for part in parts]),
            merge_extra([part.extra_info for part in parts], "BatchMeta"),
            [meta for part in parts for meta in part.custom_meta],
            [meta for part in parts for meta in part._custom_backend_meta],
        )

    @classmethod
    def empty(cls, extra_info: Meta | None = None) -> BatchMeta:
        """No rows."""
        return cls([], [], extra_info=extra_info)


def _concat_schema(name: str, parts: Sequence[BatchMeta]) -> Schema:
    schemas = [part.field_schema.get(name, {}) for part in parts]
    nested = any(schema.get("is_nested", False) for schema in schemas)
    shaped = nested or any(schema.get("per_sample_shapes") for schema in schemas)
    out: Schema = {
        "dtype": schemas[0].get("dtype"),
        "shape": None if nested else schemas[0].get("shape"),
        "is_nested": nested,
        "is_non_tensor": schemas[0].get("is_non_tensor", False),
    }
    if shaped:
        out["per_sample_shapes"] = [
            shape
            for part, schema in zip(parts, schemas, strict=True)
            for shape in (schema.get("per_sample_shapes") or [schema.get("shape")] * part.size)
        ]
    return out
