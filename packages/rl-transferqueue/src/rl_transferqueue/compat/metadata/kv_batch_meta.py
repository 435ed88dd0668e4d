"""KVBatchMeta of TransferQueue 0.1.11: mutable, made of lists, and picklable for Ray."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from rl_protocol.batch.row_ops import even_sizes
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError
from rl_transferqueue.compat.errors import KeyNotFoundError

Meta: TypeAlias = dict[str, Any]


def _equal(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, cast("torch.Tensor", b))
    return bool(np.array_equal(a, cast("Any", b))) if isinstance(a, np.ndarray) else a == b


def merge_extra(parts: Sequence[Mapping[str, Any] | None], what: str) -> Meta:
    """Merge the extra_info of all parts; parts that share a name must share its value."""
    merged: Meta = {}
    for number, part in enumerate(parts):
        for name, value in (part or {}).items():
            if name in merged and not _equal(merged[name], value):
                raise BatchError(
                    f"{what}.concat: extra_info {name!r} is {merged[name]!r} in an earlier part and {value!r} in part {number}."
                )
            merged.setdefault(name, value)
    return merged


def check_order(indexes: Sequence[int], size: int) -> None:
    """Raise BatchError unless `indexes` is a permutation of 0..size-1."""
    if sorted(indexes) != list(range(size)):
        raise BatchError(f"reorder needs each of the {size} rows exactly once; got {list(indexes)[:8]}...")


def chunk_spans(size: int, chunks: int) -> list[tuple[int, int]]:
    """Start and stop of exactly `chunks` consecutive parts whose sizes differ by at most one."""
    ends = list(itertools.accumulate(even_sizes(size, chunks)))
    return list(zip([0, *ends[:-1]], ends, strict=True))


@dataclass
class KVBatchMeta:
    """Keys and tags of rows of one partition.

    Raises:
        BatchError: repeated keys or fields, or not one tag per key.
    """

    keys: list[str] = field(default_factory=list[str])
    tags: list[Meta] = field(default_factory=list[Meta])
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: Meta | None = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise BatchError(f"KVBatchMeta needs one tag per key: {len(self.keys)} keys, {len(self.tags)} tags.")
        for what, names in (("keys", self.keys), ("fields", self.fields or [])):
            if len(set(names)) != len(names):
                raise BatchError(f"KVBatchMeta: {what} must be unique; got {names[:8]}.")
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _rows(self, rows: Sequence[int]) -> KVBatchMeta:
        keys, tags = [self.keys[row] for row in rows], [self.tags[row] for row in rows]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """The named rows, in the given order.

        Raises:
            BatchError: a key occurs twice.
            KeyNotFoundError: there is no such key.
        """
        place = {key: row for row, key in enumerate(self.keys)}
        if len(set(keys_to_select)) != len(keys_to_select):
            raise BatchError("select_keys: a key occurs twice.")
        missing = [key for key in keys_to_select if key not in place]
        if missing:
            raise KeyNotFoundError(f"{counted(len(missing), 'key')} not in this batch, the first is {missing[0]!r}.")
        return self._rows([place[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Reorder the rows in place."""
        check_order(indexes, self.size)
        self.keys, self.tags = [self.keys[i] for i in indexes], [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Exactly `chunks` consecutive parts whose sizes differ by at most one."""
        return [self._rows(range(*span)) for span in chunk_spans(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """Rows of all parts in order; empty parts are ignored.

        Raises:
            BatchError: parts disagree about the partition, the fields or extra_info.
        """
        parts = [part for part in data if part.size]
        if not parts:
            return cls()
        first = parts[0]
        for number, part in enumerate(parts):
            same_fields = part.fields is None or set(part.fields) == set(first.fields or [])
            if part.partition_id != first.partition_id or not same_fields:
                raise BatchError(
                    f"KVBatchMeta.concat: part {number} has partition {part.partition_id!r} and fields {part.fields}, "
                    f"part 0 has {first.partition_id!r} and {first.fields}."
                )
        return cls(
            [key for part in parts for key in part.keys],
            [tag for part in parts for tag in part.tags],
            first.partition_id,
            first.fields,
            merge_extra([part.extra_info for part in parts], "KVBatchMeta"),
        )
