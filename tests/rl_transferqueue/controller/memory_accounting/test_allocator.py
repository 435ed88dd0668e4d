"""`Allocator` against a model that records every range held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl_transferqueue.controller.memory_accounting.allocator import Allocator
from rl_transferqueue.wire.spans import ALIGN, rounded

CAPACITY = 64 * ALIGN


@given(st.lists(st.one_of(st.integers(0, 20 * ALIGN), st.integers(-20, -1)), max_size=60))
def test_ranges_never_overlap_and_come_back_whole(steps: list[int]) -> None:
    """A step >= 0 takes that number of bytes; a step < 0 gives back all or part of a held range."""
    space = Allocator(CAPACITY)
    held: list[tuple[int, int]] = []
    for step in steps:
        if step >= 0:
            start = space.take(step)
            if start is None:
                assert space.largest < rounded(step)
                continue
            size = rounded(step)
            assert start % ALIGN == 0
            assert start >= 0
            assert start + size <= CAPACITY <= space.capacity
            assert all(start + size <= other or other + other_size <= start for other, other_size in held)
            held.append((start, size))
        elif held:
            start, size = held.pop(step % len(held))
            part = size // ALIGN * (-step) // 20 * ALIGN
            if 0 < part < size:  # give back the end of the range and keep the beginning
                space.give(start + size - part, part)
                held.append((start, size - part))
            else:
                space.give(start, size)
        assert space.used == sum(size for _, size in held)
        assert space.high_water >= max((start + size for start, size in held), default=0)
        assert space.largest == _largest_gap(held)
    for start, size in held:
        space.give(start, size)
    assert (space.used, space.largest) == (0, CAPACITY)


def _largest_gap(held: list[tuple[int, int]]) -> int:
    at, best = 0, 0
    for start, size in sorted(held):
        best = max(best, start - at)
        at = start + size
    return max(best, CAPACITY - at)


def test_the_whole_arena_is_one_range_again_after_any_order_of_giving() -> None:
    space = Allocator(CAPACITY)
    starts = [space.take(ALIGN) for _ in range(CAPACITY // ALIGN)]
    assert space.take(1) is None
    for start in starts[::2] + starts[1::2]:
        assert start is not None
        space.give(start, ALIGN)
    assert space.take(CAPACITY) == 0


def test_requests_beyond_the_arena_find_nothing() -> None:
    space = Allocator(CAPACITY)
    assert space.take(CAPACITY + 1) is None
    assert space.take(1 << 60) is None
