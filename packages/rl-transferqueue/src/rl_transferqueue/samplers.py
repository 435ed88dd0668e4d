"""Which ready rows make the next batch, and which rank gets which of them. Pure: a sampler sees names and tags, never data.

A sampler deals in *units*: single rows, or whole groups of rows that belong together (the rollouts of one prompt). How many rows a group has
is not guessed from their order: a tag names the group, and the size is a number or another tag. A sampler that finds too few units gives
nobody anything; it never splits a unit, and never gives a row to two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from rl_protocol.errors import BatchError, ConfigError
from rl_protocol.meta import KVBatchMeta

Unit: TypeAlias = tuple[int, ...]
"""Row numbers that stay together."""
Shares: TypeAlias = tuple[tuple[int, ...], ...]
"""Row numbers for rank 0, 1, ...; empty: not enough units are ready."""


@runtime_checkable
class Sampler(Protocol):
    """Whatever chooses rows. Must be a pure function: several processes may ask it about the same rows."""

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """Choose `count` units among the rows `ready` (oldest first, with tags) for all ranks together.

        Returns:
            Row numbers of `ready` for each rank, each row at most once; () when fewer than `count` units are ready.
        """
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows with the same value of a tag belong together; a group is ready when all its rows are.

    >>> rows = KVBatchMeta(partition="p", keys=("a", "b", "c"), tags=({"uid": 1}, {"uid": 2}, {"uid": 1}))
    >>> Groups("uid", 2).units(rows)
    [(0, 2)]

    Attributes:
        tag: the tag that names the group.
        size: how many rows a group has, or the tag that says so on each of its rows.

    Raises:
        ConfigError: a size below 1.
    """

    tag: str
    size: int | str

    def __post_init__(self) -> None:
        if isinstance(self.size, int) and self.size < 1:
            raise ConfigError(f"A group has at least 1 row; got size {self.size}.")

    def units(self, ready: KVBatchMeta) -> list[Unit]:
        """The groups all of whose rows are ready, oldest first (by their oldest row).

        Raises:
            UnknownNameError: a row without the tag that names its group or its size.
            BatchError: rows of one group that disagree about its size, or more rows than it says.
        """
        members: dict[object, list[int]] = {}
        for row, group in enumerate(ready.tag_values(self.tag)):
            members.setdefault(group, []).append(row)
        sizes = ready.tag_values(self.size) if isinstance(self.size, str) else [self.size] * len(ready)
        units: list[Unit] = []
        for group, rows in members.items():
            said = {sizes[row] for row in rows}
            size = said.pop()
            if said or not isinstance(size, int) or len(rows) > size:
                raise BatchError(
                    f"Group {group!r} ({self.tag!r}) has {len(rows)} ready rows, the first is {ready.keys[rows[0]]!r}, which give its size "
                    f"({self.size!r}) as {sorted(map(str, (size, *said)))}; all rows must say one whole number, and it must be no smaller."
                )
            if len(rows) == size:
                units.append(tuple(rows))
        return units


def _units(ready: KVBatchMeta, groups: Groups | None) -> list[Unit]:
    return [(row,) for row in range(len(ready))] if groups is None else groups.units(ready)


def _check_count(count: int, ranks: int) -> None:
    if ranks < 1 or count < 1 or count % ranks:
        raise ConfigError(
            f"A batch needs at least 1 unit and the same number for each rank; got {count} for {ranks} rank(s)."
        )


def _flat(units: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(row for unit in units for row in unit)


@dataclass(frozen=True, slots=True)
class Sequential:
    """The oldest rows, for one rank."""

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """See Sampler.sample; a unit is a row."""
        return RankAware(1).sample(ready, count)


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """The oldest groups that are complete, for one rank."""

    groups: Groups

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """See Sampler.sample; a unit is a group."""
        return RankAware(1, self.groups).sample(ready, count)


@dataclass(frozen=True, slots=True)
class RankAware:
    """The oldest units, as many for each rank, in order of age: rank 0 gets the oldest.

    >>> rows = KVBatchMeta(partition="p", keys=("a", "b", "c", "d", "e"))
    >>> RankAware(ranks=2).sample(rows, 4), RankAware(ranks=2).sample(rows, 6)
    (((0, 1), (2, 3)), ())
    """

    ranks: int
    groups: Groups | None = None

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """See Sampler.sample.

        Raises:
            ConfigError: `count` does not divide evenly among the ranks.
        """
        _check_count(count, self.ranks)
        units = _units(ready, self.groups)[:count]
        each = count // self.ranks
        return tuple(_flat(units[i : i + each]) for i in range(0, count, each)) if len(units) == count else ()


@dataclass(frozen=True, slots=True)
class LengthBalanced:
    """The oldest units, as many for each rank and of nearly equal weight: see `deal` for the bound.

    Attributes:
        ranks: how many ranks share a batch.
        weight: the tag that holds a row's length (or any other whole number >= 0); a group weighs what its rows weigh together.
        groups: what stays together; None: each row for itself.
    """

    ranks: int
    weight: str
    groups: Groups | None = None

    def sample(self, ready: KVBatchMeta, count: int) -> Shares:
        """See Sampler.sample.

        Raises:
            ConfigError: `count` does not divide evenly among the ranks.
            UnknownNameError, BatchError: a row without a weight, or with one that is not a whole number >= 0.
        """
        _check_count(count, self.ranks)
        units = _units(ready, self.groups)[:count]
        if len(units) < count:
            return ()
        weights = [_weight(key, value) for key, value in zip(ready.keys, ready.tag_values(self.weight), strict=True)]
        hands = deal([sum(weights[row] for row in unit) for unit in units], self.ranks)
        return tuple(_flat([units[i] for i in hand]) for hand in hands)


def _weight(key: str, value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise BatchError(f"The weight of row {key!r} must be a whole number >= 0; got {value!r}.")
    return value


def deal(weights: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal items to `ranks` hands of equal size so that their weights are nearly equal.

    In each round the next heaviest items go out, the heaviest to the lightest hand. The hands then differ by at most the difference between
    the heaviest and the lightest item: a round changes no gap between two hands to more than the larger of that gap and the spread of the
    round's items, for the gap and the two items have opposite signs.

    >>> deal([9, 1, 5, 5], 2)
    [[0, 1], [2, 3]]

    Returns:
        Item numbers of each hand, ascending.
    """
    _check_count(max(len(weights), ranks), ranks)
    order = np.argsort(-np.asarray(weights, dtype=np.int64), kind="stable").tolist()
    hands: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=lambda hand: (sums[hand], hand))
        for hand, item in zip(lightest_first, order[start : start + ranks], strict=True):
            hands[hand].append(item)
            sums[hand] += weights[item]
    return [sorted(hand) for hand in hands]
