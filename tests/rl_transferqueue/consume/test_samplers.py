"""Samplers: no row is lost or drawn twice, groups stay whole, and the imbalance is bounded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError, ConfigError, KVBatchMeta, UnknownNameError
from rl_transferqueue.consume.samplers import (
    Groups,
    LengthBalanced,
    RankAware,
    Sampler,
    Sequential,
    Shares,
    WholeGroups,
    balance,
)


def rows(tags: list[dict[str, int | str]]) -> KVBatchMeta:
    return KVBatchMeta(partition="p", keys=tuple(f"k{i}" for i in range(len(tags))), tags=tuple(tags))  # type: ignore[arg-type]


def flat(shares: Shares) -> list[int]:
    return [row for share in shares for row in share]


@st.composite
def mixed_groups(draw: st.DrawFn) -> tuple[KVBatchMeta, dict[int, int]]:
    """Generate complete and incomplete groups, their rows in any order, and each group's size."""
    sizes = dict(enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))))
    there = [(g, i) for g, size in sizes.items() for i in range(draw(st.integers(0, size)))]
    order = draw(st.permutations(there))
    return rows([{"uid": g, "n": sizes[g], "len": draw(st.integers(0, 1000))} for g, _ in order]), sizes


def test_sequential_takes_the_oldest() -> None:
    ready = rows([{}] * 5)
    assert Sequential().sample(ready, 3) == ((0, 1, 2),)
    assert Sequential().sample(ready, 5) == ((0, 1, 2, 3, 4),)
    assert Sequential().sample(ready, 6) == ()


def test_groups_are_found_by_tag_wherever_their_rows_lie() -> None:
    ready = rows([{"uid": u} for u in ("b", "a", "c", "a", "b", "a")])
    assert Groups("uid", 2).units(rows([{"uid": u} for u in "bacab"])) == [(0, 4), (1, 3)]
    assert WholeGroups(Groups("uid", 3)).sample(ready, 1) == ((1, 3, 5),)
    assert WholeGroups(Groups("uid", 3)).sample(ready, 2) == ()


def test_a_group_may_say_its_own_size() -> None:
    ready = rows([{"uid": 1, "n": 2}, {"uid": 2, "n": 3}, {"uid": 3, "n": 1}, {"uid": 2, "n": 3}, {"uid": 1, "n": 2}])
    assert WholeGroups(Groups("uid", "n")).sample(ready, 2) == ((0, 4, 2),)


def test_the_oldest_group_is_the_one_with_the_oldest_row() -> None:
    ready = rows([{"uid": 7}, {"uid": 8}, {"uid": 8}, {"uid": 7}])
    assert WholeGroups(Groups("uid", 2)).sample(ready, 1) == ((0, 3),)


def test_rank_aware_gives_each_rank_as_much() -> None:
    ready = rows([{"uid": u} for u in "aabbccdd"])
    assert RankAware(2, Groups("uid", 2)).sample(ready, 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert RankAware(4).sample(ready, 8) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_lengths_are_balanced() -> None:
    ready = rows([{"len": n} for n in (8, 7, 6, 5, 4, 3, 2, 1)])
    shares = LengthBalanced(2, "len").sample(ready, 8)
    assert [sum(8 - row for row in share) for share in shares] == [18, 18]
    assert balance([10, 1, 1, 1], 2) == [[0, 3], [1, 2]]
    assert balance([], 3) == [[], [], []]


@pytest.mark.parametrize(("count", "ranks"), [(3, 2), (0, 1), (2, 0), (-2, 2)])
def test_a_batch_that_does_not_divide_is_refused(count: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} for {ranks} rank"):
        RankAware(ranks).sample(rows([{}] * 8), count)
    with pytest.raises(ConfigError):
        Groups("uid", 0)


def test_groups_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(BatchError, match=r"'x'.*3 ready rows"):
        Groups("uid", 2).units(rows([{"uid": "x"}] * 3))
    with pytest.raises(BatchError, match=r"\['2', '3'\]"):
        Groups("uid", "n").units(rows([{"uid": "x", "n": 2}, {"uid": "x", "n": 3}]))
    with pytest.raises(BatchError, match="integer size"):
        Groups("uid", "n").units(rows([{"uid": "x", "n": "two"}]))
    with pytest.raises(UnknownNameError, match="k1"):
        Groups("uid", 2).units(rows([{"uid": "x"}, {}]))
    with pytest.raises(BatchError, match=r"k1.*-4"):
        LengthBalanced(1, "len").sample(rows([{"len": 3}, {"len": -4}]), 2)
    with pytest.raises(BatchError, match=r"k0.*True"):
        LengthBalanced(1, "len").sample(rows([{"len": True}]), 1)
    with pytest.raises(BatchError, match="integer size"):
        Groups("uid", "n").units(rows([{"uid": "x", "n": True}]))
    with pytest.raises(ConfigError, match="1 for 2 rank"):
        balance([7], 2)


def test_users_define_their_own() -> None:
    class Newest:
        def sample(self, ready: KVBatchMeta, count: int) -> Shares:
            return (tuple(range(len(ready) - count, len(ready))),) if count <= len(ready) else ()

    own: Sampler = Newest()
    assert isinstance(own, Sampler)
    assert own.sample(rows([{}] * 4), 2) == ((2, 3),)


@given(mixed_groups(), st.integers(1, 4), st.integers(1, 4))
def test_groups_stay_whole_no_row_goes_to_two_and_the_oldest_go_first(
    case: tuple[KVBatchMeta, dict[int, int]], ranks: int, each: int
) -> None:
    ready, sizes = case
    uids = ready.tag_values("uid")
    groups = Groups("uid", "n")
    complete = [g for g in dict.fromkeys(uids) if uids.count(g) == sizes[g]]  # type: ignore[index]
    for sampler in (RankAware(ranks, groups), LengthBalanced(ranks, "len", groups)):
        shares = sampler.sample(ready, ranks * each)
        if len(complete) < ranks * each:
            assert shares == ()
            continue
        assert len(set(flat(shares))) == len(flat(shares))
        per_rank = [{uids[row] for row in share} for share in shares]
        assert [len(p) for p in per_rank] == [each] * ranks
        assert sorted(flat(shares)) == sorted(i for i, u in enumerate(uids) if u in complete[: ranks * each])
        assert all(a.isdisjoint(b) for a, b in itertools.combinations(per_rank, 2))


@given(st.lists(st.integers(0, 10_000) | st.integers(0, 2**64 - 1), max_size=60), st.integers(1, 7))
def test_part_weights_differ_at_most_by_the_spread_of_the_items(weights: list[int], ranks: int) -> None:
    weights = weights[: len(weights) // ranks * ranks]
    parts = balance(weights, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert len({len(part) for part in parts}) == 1
    sums = [sum(weights[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(weights, default=0) - min(weights, default=0)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_batch_after_batch_every_row_comes_exactly_once(total: int, ranks: int, each: int) -> None:
    left = rows([{"len": i % 7} for i in range(total)])
    seen: list[str] = []
    while shares := LengthBalanced(ranks, "len").sample(left, ranks * each):
        taken = flat(shares)
        seen += left.select_rows(taken).keys
        left = left.select_rows([i for i in range(len(left)) if i not in set(taken)])
    assert len(left) == total % (ranks * each)
    assert sorted([*seen, *left.keys]) == sorted(f"k{i}" for i in range(total))
