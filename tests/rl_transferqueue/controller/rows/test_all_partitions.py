"""`Partitions`: when a partition exists, and how long an empty one is remembered."""

from __future__ import annotations

from rl_transferqueue.controller.rows.all_partitions import Partitions


def fill(partitions: Partitions, name: str) -> None:
    table = partitions.get_or_add(name)
    slots, _ = table.add(("k",), 1)
    partitions.touch(table, slots)


def drop(partitions: Partitions, name: str) -> None:
    table = partitions.get(name)
    slots = table.slots()
    partitions.touch(table, slots)
    table.remove(slots)
    partitions.drop_if_empty(name)


def test_a_partition_is_there_while_it_has_rows() -> None:
    partitions = Partitions()
    assert partitions.find("p") is None
    assert len(partitions.get("p")) == 0
    fill(partitions, "p")
    partitions.drop_if_empty("p")
    assert [name for name, _ in partitions.items()] == ["p"]
    drop(partitions, "p")
    assert partitions.find("p") is None


def test_when_a_partition_became_empty_is_known_until_it_is_there_again() -> None:
    partitions = Partitions()
    fill(partitions, "p")
    filled = partitions.version
    drop(partitions, "p")
    assert partitions.emptied_after("p", filled)
    assert not partitions.emptied_after("p", partitions.version)
    fill(partitions, "p")
    assert not partitions.emptied_after("p", 0)


def test_only_so_many_names_are_remembered() -> None:
    partitions = Partitions()
    for name in ("first", "x" * (1 << 20)):
        fill(partitions, name)
        drop(partitions, name)
    assert not partitions.emptied_after("first", 0)
