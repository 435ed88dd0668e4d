"""`MemoryQueue`: the order in which waiting puts are served, in fixed and random cases."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rl_transferqueue.controller.memory_accounting.memory_queue import MemoryQueue
from rl_transferqueue.wire.spans import ALIGN, Span


class Room:
    """A contiguous range of free 64-byte units."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.asked: list[tuple[str, int]] = []

    def take(self, put: str, nbytes: int) -> Span | None:
        self.asked.append((put, nbytes // ALIGN))
        if nbytes > self.units * ALIGN:
            return None
        self.units -= nbytes // ALIGN
        return Span(0, 0, nbytes)


def queue_of(**sizes: int) -> MemoryQueue[str]:
    queue = MemoryQueue[str]()
    for put, units in sizes.items():
        queue.add(put, units * ALIGN)
    return queue


def served(queue: MemoryQueue[str], units: int) -> list[str]:
    return [put for put, _ in queue.serve(Room(units).take)]


def test_puts_that_all_fit_are_served_in_order_of_arrival() -> None:
    assert served(queue_of(a=3, b=1, c=2), 6) == ["a", "b", "c"]


def test_a_small_put_does_not_wait_behind_a_large_one_that_does_not_fit() -> None:
    queue = queue_of(large=10, small=1, other=2)
    assert served(queue, 4) == ["small", "other"]
    assert served(queue, 10) == ["large"]
    assert len(queue) == 0


def test_a_put_is_passed_by_at_most_as_many_bytes_as_it_asks_for() -> None:
    queue = queue_of(large=10)
    for number in range(10):
        queue.add(f"small{number}", ALIGN)
        assert served(queue, 9) == [f"small{number}"]
    queue.add("late", ALIGN)
    assert served(queue, 9) == []  # ten units have passed `large`, so no put may pass it now
    assert served(queue, 11) == ["large", "late"]


def test_what_passes_counts_for_every_put_that_it_passes() -> None:
    queue = queue_of(large=10, middle=4, one=3)
    assert served(queue, 3) == ["one"]
    queue.add("two", 2 * ALIGN)
    assert served(queue, 3) == []  # three of the four units that may pass `middle` have passed
    queue.add("three", ALIGN)
    assert served(queue, 3) == ["three"]
    assert served(queue, 6) == ["middle", "two"]


def test_only_puts_that_came_later_and_were_served_first_count() -> None:
    queue = queue_of(a=2, large=5, b=3, c=2, d=1)
    assert served(queue, 6) == ["a", "b", "d"]  # four units have passed `large`, one has passed `c`
    queue.add("e", ALIGN)
    assert served(queue, 4) == ["e"]  # `c` would be the sixth unit that passes `large`
    queue.add("f", ALIGN)
    assert served(queue, 4) == []
    assert served(queue, 8) == ["large", "c", "f"]


def test_no_larger_piece_is_asked_for_after_one_that_was_not_there() -> None:
    room = Room(3)
    queue_of(a=5, b=6, c=5, d=4, e=4, f=2).serve(room.take)
    assert room.asked == [("a", 5), ("d", 4), ("f", 2)]


def test_a_put_that_leaves_is_forgotten() -> None:
    queue = queue_of(large=10, small=1)
    queue.discard("large")
    queue.discard("large")
    assert "large" not in queue
    assert queue.nbytes == ALIGN
    assert queue.clear() == ["small"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=40))
def test_the_rule_holds_for_any_arrivals(arrivals: list[tuple[int, int]]) -> None:
    """Every put is served or waits.

    A put is passed by at most as many bytes as it asks for. A put that fits waits only if serving
    it would break this limit for an earlier put.
    """
    queue = MemoryQueue[str]()
    waiting: dict[str, int] = {}
    passed: dict[str, int] = {}
    for number, (size, units) in enumerate(arrivals):
        queue.add(str(number), size * ALIGN)
        waiting[str(number)], passed[str(number)] = size, 0
        room = Room(units)
        for put, span in queue.serve(room.take):
            assert span.nbytes == waiting.pop(put) * ALIGN
            for other in waiting:
                if int(other) < int(put):
                    passed[other] += span.nbytes // ALIGN
        for put, most in waiting.items():
            assert passed[put] <= most
            before = [other for other in waiting if int(other) < int(put)]
            if waiting[put] <= room.units:
                assert any(passed[other] + waiting[put] > waiting[other] for other in before)
    assert len(queue) == len(waiting)
