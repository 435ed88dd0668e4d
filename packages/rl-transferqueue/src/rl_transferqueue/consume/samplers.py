"""Samplers: pure functions that choose the rows of the next batch and assign them to ranks.

A sampler sees keys and tags, never data. It chooses *units*: single rows, or whole groups of rows
(the rollouts of a prompt). A tag names the group of a row; the group's size is a number or another
tag. A sampler never splits a unit, and never gives a row to two ranks. If too few units are ready,
it returns no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from rl_protocol.batch.kv_batch_meta import KVBatchMeta
from rl_protocol.errors import BatchError, ConfigError

Unit: TypeAlias = tuple[int, ...]
"""Row numbers of one row or group."""
Shares: TypeAlias = tuple[tuple[int, ...], ...]
"""Row numbers for rank 0, 1, ...; empty if too few units are ready."""


@runtime_checkable
class Sampler(Protocol):
    """Chooses rows. Must be a pure function: several processes may ask it about the same rows.

    A sampler with the attribute `ranks`, the number of shares it makes, lets a `StreamingDataset`
    refuse another rank before it draws.
    """

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """Choose `count` units among `ready`, which has the ready rows with tags, oldest first.

        Returns:
            Row numbers of `ready` for each rank, each row at most once; () if fewer than `count`
            units are ready.
        """
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups the rows with the same value of a tag; a group is ready when all its rows are.

    >>> rows = KVBatchMeta(partition="p", keys=("a", "b", "c"), tags=({"uid": 1}, {"uid": 2}, {"uid": 1}))
    >>> Groups("uid", 2).units(rows)
    [(0, 2)]

    Attributes:
        tag: the tag that names the group.
        size: the number of rows in a group, or the tag that holds it.

    Raises:
        ConfigError: the size is below 1.
    """

    tag: str
    size: int | str

    def __post_init__(self) -> None:
        if isinstance(self.size, int) and self.size < 1:
            raise ConfigError(f"A group has at least 1 row; got size {self.size}.")

    def units(self, ready: KVBatchMeta) -> list[Unit]:
        """The complete groups, in the order of their oldest rows.

        Raises:
            UnknownNameError: a row has no tag for its group or the group's size.
            BatchError: rows of a group disagree about its size, or there are more rows than that.
        """
        members: dict[object, list[int]] = {}
        for row, group in enumerate(ready.tag_values(self.tag)):
            members.setdefault(group, []).append(row)
        sizes = ready.tag_values(self.size) if isinstance(self.size, str) else [self.size] * len(ready)
        units: list[Unit] = []
        for group, rows in members.items():
            values = {sizes[row] for row in rows}
            size = values.pop()
            if values or not isinstance(size, int) or isinstance(size, bool) or len(rows) > size:
                raise BatchError(
                    f"Group {group!r} ({self.tag!r}) has {len(rows)} ready rows, the first is {ready.keys[rows[0]]!r}, "
                    f"and its size ({self.size!r}) is {sorted(map(str, (size, *values)))}; all rows must have the same "
                    f"integer size, and it must be at least {len(rows)}."
                )
            if len(rows) == size:
                units.append(tuple(rows))
        return units


def _units(ready: KVBatchMeta, groups: Groups | None) -> list[Unit]:
    return [(row,) for row in range(len(ready))] if groups is None else groups.units(ready)


def _check_count(count: int, ranks: int) -> None:
    if ranks < 1 or count < 1 or count % ranks:
        raise ConfigError(f"count must be a positive multiple of the number of ranks; got {count} for {ranks} rank(s).")


def _flat(units: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(row for unit in units for row in unit)


@dataclass(frozen=True, slots=True)
class Sequential:
    """Chooses the oldest rows, for one rank; a unit is a row."""

    ranks: ClassVar[int] = 1

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        return RankAware(1).sample(ready, count)


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """Chooses the oldest complete groups, for one rank; a unit is a group."""

    groups: Groups
    ranks: ClassVar[int] = 1

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        return RankAware(1, self.groups).sample(ready, count)


@dataclass(frozen=True, slots=True)
class RankAware:
    """Chooses the oldest units and gives each rank the same number; rank 0 gets the oldest.

    >>> rows = KVBatchMeta(partition="p", keys=("a", "b", "c", "d", "e"))
    >>> RankAware(ranks=2).sample(rows, 4), RankAware(ranks=2).sample(rows, 6)
    (((0, 1), (2, 3)), ())
    """

    ranks: int
    groups: Groups | None = None

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """Choose `count` units.

        Raises:
            ConfigError: `count` is not a positive multiple of `ranks`.
        """
        _check_count(count, self.ranks)
        units = _units(ready, self.groups)[:count]
        each = count // self.ranks
        return tuple(_flat(units[i : i + each]) for i in range(0, count, each)) if len(units) == count else ()


@dataclass(frozen=True, slots=True)
class LengthBalanced:
    """Chooses the oldest units and gives each rank the same number, with nearly equal total weight.

    Attributes:
        ranks: number of ranks.
        weight: the tag with a row's weight, an integer >= 0 such as its length. A group's weight is
            the sum over its rows.
        groups: the rows that stay together; None: a unit is a row.
    """

    ranks: int
    weight: str
    groups: Groups | None = None

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """Choose `count` units; see `balance` for how even the weights are.

        Raises:
            ConfigError: `count` is not a positive multiple of `ranks`.
            UnknownNameError: a row has no weight.
            BatchError: a weight is not an integer >= 0.
        """
        _check_count(count, self.ranks)
        units = _units(ready, self.groups)[:count]
        if len(units) < count:
            return ()
        weights = [_weight(key, value) for key, value in zip(ready.keys, ready.tag_values(self.weight), strict=True)]
        parts = balance([sum(weights[row] for row in unit) for unit in units], self.ranks)
        return tuple(_flat([units[i] for i in part]) for part in parts)


def _weight(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BatchError(f"The weight of row {key!r} must be an integer >= 0; got {value!r}.")
    return value


def balance(weights: Sequence[int], ranks: int) -> list[list[int]]:
    """Split items into `ranks` parts of equal size and nearly equal weight.

    Each round gives every part one of the next heaviest items, the heaviest to the lightest part.
    The weights of two parts then differ by at most the difference between the heaviest and the
    lightest item: in a round the gap between two parts and the gap between their new items have
    opposite signs, so the new gap is at most the larger of the two.

    >>> balance([9, 1, 5, 5], 2)
    [[0, 1], [2, 3]]

    Returns:
        Item numbers of each part, ascending.
    """
    _check_count(len(weights) or ranks, ranks)
    order = sorted(range(len(weights)), key=lambda item: -weights[item])
    parts: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=lambda part: (sums[part], part))
        for part, item in zip(lightest_first, order[start : start + ranks], strict=True):
            parts[part].append(item)
            sums[part] += weights[item]
    return [sorted(part) for part in parts]
