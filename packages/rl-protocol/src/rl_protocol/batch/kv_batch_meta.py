"""KVBatchMeta: keys, tags and column names of rows, passed around instead of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Self, TypeAlias, TypeVar, cast, overload

import numpy as np

from rl_protocol.batch.row_ops import Indices, RowOps, check_indices
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, UnknownNameError

Scalar: TypeAlias = bool | int | float | str | None
Tag: TypeAlias = dict[str, Scalar]
"""Small facts about one row: status, policy version, lengths."""
T = TypeVar("T")
_SCALARS = (bool, int, float, str, type(None))


def check_tag(key: str, name: str, value: object) -> Scalar:
    """Return the value if a tag may have it. NaN is illegal, because no read could select the row.

    Raises:
        BatchError: name or value are not legal; names row and tag.
    """
    if not isinstance(cast(object, name), str):
        raise BatchError(f"The name of a tag must be a string; got {name!r} in row {key!r}.")
    if not isinstance(value, _SCALARS) or isinstance(value, np.generic):
        raise BatchError(f"Tag {name!r} of row {key!r} must be a bool, int, float, str or None; got {value!r}.")
    if isinstance(value, float) and math.isnan(value):
        raise BatchError(f"Tag {name!r} of row {key!r} is NaN, which equals no value; use None, or leave the tag out.")
    return value


def check_where(where: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Check the tags of a filter or an expectation.

    Raises:
        BatchError: no tag can have such a name or value; names the tag.
    """
    for name, value in where.items():
        if not isinstance(cast(object, name), str) or not isinstance(cast(object, value), _SCALARS):
            raise BatchError(
                f"Rows can't be selected by tag {name!r}: a name is a string, and a value a bool, int, float, str or "
                f"None; got {value!r}."
            )
        if isinstance(value, float) and math.isnan(value):
            raise BatchError(f"Rows can't be selected by tag {name!r}: it is NaN, which no tag equals; leave it out.")
    return dict(where)


class LazyRows(Sequence[T]):
    """A value for each of `size` rows, built on first access; equal to the tuple of the values.

    Planes list many rows whose tags and generations are often not read, and a dict or an int per
    row is expensive.

    >>> tags = LazyRows(2, lambda: ({"n": 1}, {"n": 2}))
    >>> len(tags), tags[1], tags == ({"n": 1}, {"n": 2})
    (2, {'n': 2}, True)
    """

    __slots__ = ("_make", "_size")

    def __init__(self, size: int, make: Callable[[], tuple[T, ...]]) -> None:
        self._size = size
        self._make: Callable[[], tuple[T, ...]] | tuple[T, ...] = make

    def _rows(self) -> tuple[T, ...]:
        if not isinstance(self._make, tuple):
            self._make = self._make()
        return self._make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._rows()[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._rows())

    def __eq__(self, other: object) -> bool:
        return self._rows() == tuple(other) if isinstance(other, tuple | LazyRows) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rows())

    def __repr__(self) -> str:
        return repr(self._rows())

    def __reduce__(self) -> tuple[type[tuple[T, ...]], tuple[tuple[T, ...]]]:
        return tuple, (self._rows(),)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBatchMeta(RowOps):
    """The keys of N rows of one partition, with their tags and known columns.

    >>> meta = KVBatchMeta(partition="train", keys=("a", "b"), tags=({"n": 1}, {"n": 2}), fields=("score",))
    >>> [part.keys for part in meta.chunk(2)], KVBatchMeta.concat(meta.chunk(2)) == meta
    ([('a',), ('b',)], True)

    Raises:
        BatchError: a key repeats, there is not one tag per key, or `keys` or `fields` is a string.
    """

    partition: str
    """The partition that holds the rows."""
    keys: tuple[str, ...]
    """[N] unique names."""
    tags: Sequence[Tag] = ()
    """[N], or empty if the rows have no tags. A tuple, or an equal `LazyRows`."""
    fields: tuple[str, ...] = ()
    """Columns that all rows have; empty: unknown."""
    extra_info: dict[str, Scalar] = field(default_factory=dict[str, Scalar])
    """Facts about the whole batch (temperature, policy version), never metrics."""
    generations: Sequence[int] = ()
    """[N], or empty: any. The generation of each row, 0: any. Clearing a row and putting it again
    changes it. A tuple, or an equal `LazyRows`."""

    def __post_init__(self) -> None:
        for name in ("keys", "tags", "fields", "generations"):
            if isinstance(given := getattr(self, name), list):  # as decoders make it
                object.__setattr__(self, name, tuple(cast("list[object]", given)))
            elif isinstance(given, str):
                raise BatchError(
                    f"{name} of a KVBatchMeta must be a tuple; got one string, {given!r}: put it in a tuple."
                )
        if len(set(self.keys)) != len(self.keys):
            seen: set[str] = set()
            twice = next(key for key in self.keys if key in seen or seen.add(key))
            raise BatchError(f"Keys of a KVBatchMeta must be unique; {twice!r} occurs more than once.")
        if self.tags and len(self.tags) != len(self.keys):
            raise BatchError(
                f"A KVBatchMeta needs one tag per key or none at all; got {counted(len(self.keys), 'key')}, {counted(len(self.tags), 'tag')}."
            )
        if self.generations and len(self.generations) != len(self.keys):
            raise BatchError(
                f"A KVBatchMeta needs one generation per key or none at all; got {counted(len(self.keys), 'key')}, "
                f"{counted(len(self.generations), 'generation')}."
            )

    @classmethod
    def unchecked(
        cls,
        partition: str,
        keys: tuple[str, ...],
        tags: Sequence[Tag],
        fields: tuple[str, ...],
        generations: Sequence[int],
    ) -> Self:
        """Build without the checks, which are slow for many rows; for planes listing own rows."""
        made = object.__new__(cls)
        put = object.__setattr__
        put(made, "partition", partition)
        put(made, "keys", keys)
        put(made, "tags", tags)
        put(made, "fields", fields)
        put(made, "extra_info", {})
        put(made, "generations", generations)
        return made

    def __len__(self) -> int:
        return len(self.keys)

    def __bool__(self) -> bool:
        return len(self.keys) > 0

    def tag_values(self, name: str) -> list[Scalar]:
        """The value of one tag for every row, [N].

        Raises:
            UnknownNameError: a row lacks that tag.
        """
        tags = self.tags or ({},) * len(self)
        try:
            return list(map(itemgetter(name), tags))
        except KeyError:
            key, tag = next((key, tag) for key, tag in zip(self.keys, tags, strict=True) if name not in tag)
            raise UnknownNameError(f"Row {key!r} has no tag {name!r}; it has {sorted(tag)}.") from None

    def select_rows(self, rows: Indices) -> Self:
        """The rows in the given order, with their tags."""
        index = check_indices(rows, len(self)).tolist()
        return replace(
            self,
            keys=_chosen(self.keys, index),
            tags=_chosen(self.tags, index),
            generations=_chosen(self.generations, index),
        )

    def select_keys(self, keys: Sequence[str]) -> Self:
        """The named rows in the given order.

        Raises:
            UnknownNameError: a key is not in this batch.
        """
        place = dict(zip(self.keys, range(len(self)), strict=True))
        try:
            return self.select_rows(list(map(place.__getitem__, keys)))
        except KeyError:
            missing = [key for key in keys if key not in place]
            raise UnknownNameError(
                f"{counted(len(missing), 'key')} not in this batch of partition {self.partition!r}, the first is {missing[0]!r}."
            ) from None

    def select_fields(self, names: Sequence[str]) -> Self:
        """The same rows, restricted to these columns.

        Raises:
            UnknownNameError: a column is not among `fields`.
        """
        missing = [name for name in names if name not in self.fields]
        if missing:
            raise UnknownNameError(
                f"No column {missing[0]!r} in this batch; it has {', '.join(self.fields) or 'none that are known'}."
            )
        return replace(self, fields=tuple(names))

    def without_tags(self) -> Self:
        """The same rows without tags, for workers that need only the keys.

        Its attributes are plain tuples, which msgspec can encode.
        """
        return replace(self, tags=(), generations=tuple(self.generations))

    def union(self, other: Self) -> Self:
        """The same rows with the columns, tags and extra_info of both.

        Raises:
            BatchError: the rows or their generations differ, or both have a tag or fact with
                different values.
        """
        if (other.partition, other.keys) != (self.partition, self.keys):
            raise BatchError(
                "union needs the same partition and the same keys in the same order; select_keys one like the other first."
            )
        mine, theirs = self.tags or ({},) * len(self), other.tags or ({},) * len(self)
        tags = tuple(_merge(a, b, f"row {key!r}") for key, a, b in zip(self.keys, mine, theirs, strict=True))
        return replace(
            self,
            tags=tags if any(tags) else (),
            fields=tuple(dict.fromkeys((*self.fields, *other.fields))),
            extra_info=_merge(self.extra_info, other.extra_info, "extra_info"),
            generations=_merge_generations(self, other),
        )

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Rows of all parts in order.

        Parts must agree in partition, columns and extra_info, and in whether they have tags.

        Raises:
            BatchError: there are no parts, or they do not agree.
        """
        if not parts:
            raise BatchError("concat needs at least one part; got none.")
        first = parts[0]
        for number, part in enumerate(parts):
            if (part.partition, set(part.fields), part.extra_info) != (
                first.partition,
                set(first.fields),
                first.extra_info,
            ):
                raise BatchError(
                    f"Part {number} differs from part 0 in partition, fields or extra_info: "
                    f"({part.partition!r}, {sorted(part.fields)}, {part.extra_info}) against "
                    f"({first.partition!r}, {sorted(first.fields)}, {first.extra_info})."
                )
        tagged = {bool(part.tags) for part in parts if part}
        if len(tagged) > 1:
            raise BatchError(
                "Some parts have tags and some have none; concat would lose them: use without_tags on all or on none."
            )
        known = any(part.generations for part in parts)
        return replace(
            first,
            keys=tuple(chain.from_iterable(part.keys for part in parts)),
            tags=tuple(chain.from_iterable(part.tags for part in parts)),
            generations=tuple(chain.from_iterable(map(_generations, parts))) if known else (),
        )


def _chosen(values: Sequence[T], index: Sequence[int]) -> tuple[T, ...]:
    """Values of these rows; none if no row has one."""
    return tuple(map(tuple(values).__getitem__, index)) if values else ()


def _generations(meta: KVBatchMeta) -> Sequence[int]:
    return meta.generations or (0,) * len(meta)


def _merge_generations(a: KVBatchMeta, b: KVBatchMeta) -> Sequence[int]:
    for key, x, y in zip(a.keys, _generations(a), _generations(b), strict=True):
        if x and y and x != y:
            raise BatchError(f"union: row {key!r} was cleared and put again between the two batches ({x}, {y}).")
    if not a.generations or not b.generations:
        return a.generations or b.generations
    return tuple(x or y for x, y in zip(a.generations, b.generations, strict=True))


def _merge(a: Mapping[str, Scalar], b: Mapping[str, Scalar], where: str) -> Tag:
    for name in a.keys() & b.keys():
        if a[name] != b[name]:
            raise BatchError(f"union: {name!r} of {where} is {a[name]!r} in one batch and {b[name]!r} in the other.")
    return {**a, **b}
