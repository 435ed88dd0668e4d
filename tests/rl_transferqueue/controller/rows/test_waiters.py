"""Waiters and watchers in fixed cases; test_ledger.py tests random sequences."""

from __future__ import annotations

import numpy as np

from rl_transferqueue.controller.rows.all_partitions import Partitions
from rl_transferqueue.controller.rows.waiters import Served, Waiter, Waiters, Watcher


class Rows:
    """Partition "p", to which rows are added by key."""

    def __init__(self) -> None:
        self.partitions = Partitions()
        self.waiters = Waiters(self.partitions)
        self.generation = 1

    def add(self, *keys: str) -> Served:
        table = self.partitions.get_or_add("p")
        slots, new = table.add(keys, self.generation)
        self.generation += len(keys)
        before = self.waiters.count_ready("p", table, slots, new)
        self.partitions.touch(table, slots)
        return self.waiters.serve("p", table, slots, before)

    def slots(self, *keys: str) -> np.ndarray:
        return self.partitions.get("p").find(keys)[0]


def waiter(count: int, task: str | None = None, token: object = None) -> Waiter:
    return Waiter(partition="p", count=count, fields=(), where={}, task=task, token=token)


def test_a_wait_that_is_fulfilled_is_answered_at_once_and_not_kept() -> None:
    rows = Rows()
    rows.add("a", "b")
    found = rows.waiters.wait(waiter(1))
    assert found is not None
    assert found.keys == ("a",)
    assert rows.add("c") == []


def test_waiters_are_served_in_order_of_arrival_with_the_oldest_rows() -> None:
    rows = Rows()
    first, second = waiter(2, "train", 1), waiter(1, "train", 2)
    assert rows.waiters.wait(first) is None
    assert rows.waiters.wait(second) is None
    served = rows.add("a", "b", "c")
    assert [(who.token, answer.keys) for who, answer in served] == [(1, ("a", "b")), (2, ("c",))]


def test_a_waiter_that_was_forgotten_is_not_served() -> None:
    rows = Rows()
    who = waiter(1)
    assert rows.waiters.wait(who) is None
    rows.waiters.forget(who)
    rows.waiters.forget(who)
    assert rows.add("a") == []


def test_rows_that_are_given_back_serve_a_waiter_of_their_task_alone() -> None:
    rows = Rows()
    rows.add("a")
    table = rows.partitions.get("p")
    rows.waiters.consume("p", table, rows.slots("a"), "train")
    other, same = waiter(1, "eval", 1), waiter(1, "train", 2)
    assert rows.waiters.wait(other) is not None
    assert rows.waiters.wait(same) is None
    consumed, served = rows.waiters.unconsume("p", table, rows.slots("a"), ["train"])
    assert consumed.tolist() == rows.slots("a").tolist()
    assert [who.token for who, _ in served] == [2]


def test_a_watcher_is_served_by_the_next_change_that_it_shows() -> None:
    rows = Rows()
    rows.add("a")
    seen = rows.waiters.changes(Watcher(partition="p", since=0, where={}, token=None))
    assert (seen.reset, seen.rows.keys) == (True, ("a",))
    watcher = Watcher(partition="p", since=seen.version, where={}, token=7)
    assert rows.waiters.watch(watcher) is None
    ((who, changes),) = rows.add("b")
    assert (who.token, changes.reset, changes.rows.keys) == (7, False, ("b",))
    assert rows.add("c") == []
