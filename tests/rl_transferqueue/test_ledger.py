"""The ledger against a model of dictionaries: rows, tags, places, consumption, leases and released blocks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rl_protocol import BatchData, BatchError, DuplicateKeyError, MissingDataError, WireError, dense
from rl_protocol.wire import plan
from rl_transferqueue.ledger import Ledger, Waiter
from rl_transferqueue.messages import BlockRef, Compacted, Located

KEYS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)
FIELDS = st.lists(st.sampled_from("xyz"), min_size=0, max_size=3, unique=True)
TAGS = st.dictionaries(st.sampled_from("mn"), st.integers(0, 1), max_size=2)
SESSION = b"session."


def header_of(names: list[str] | tuple[str, ...], rows: int) -> bytes:
    batch = BatchData({name: dense(np.zeros((rows, 200), np.float32)) for name in names}, rows)
    return msgspec.msgpack.encode(plan(batch))


def places(located: Located, fields: list[str]) -> dict[str, list[tuple[int, int]]]:
    """column -> (block id, row in block) of each row."""
    out: dict[str, list[tuple[int, int]]] = {}
    for name, place in zip(fields, located.place_of, strict=True):
        blocks, rows = (np.frombuffer(part, "<i4").tolist() for part in located.places[place])
        out[name] = [(located.blocks[b].id, r) for b, r in zip(blocks, rows, strict=True)]
    return out


class LedgerMachine(RuleBasedStateMachine):
    """One partition; the model keeps, per row, which put wrote each column and at which row of the put."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.rows: dict[str, dict[str, tuple[int, int]]] = {}  # key -> column -> (put, row of the put)
        self.tags: dict[str, dict[str, int]] = {}
        self.consumed: dict[str, set[str]] = {"s": set(), "t": set()}
        self.content: dict[
            int, dict[tuple[str, int], tuple[int, int]]
        ] = {}  # block -> (column, row) -> (put, row of the put)
        self.freed: set[int] = set()
        self.leases: dict[int, set[int]] = {}
        self.waiters: list[Waiter] = []
        self.puts = self.last_block = self.last_lease = 0

    def new_block(self) -> BlockRef:
        self.last_block += 1
        return BlockRef(self.last_block, 0, self.last_block << 20, 1 << 16)

    def fits(self, key: str, waiter: Waiter) -> bool:
        tags = self.tags[key]
        return (
            all(f in self.rows[key] for f in waiter.fields)
            and all(tags.get(k) == v for k, v in waiter.where.items())
            and (waiter.task is None or key not in self.consumed[waiter.task])
        )

    def serve(self, served: list[tuple[Waiter, object]]) -> None:
        """Waiters are served in order of arrival with the oldest rows that fit."""
        got = {id(waiter): rows for waiter, rows in served}
        for waiter in list(self.waiters):
            ready = [key for key in self.rows if self.fits(key, waiter)]
            if len(ready) < waiter.count:
                assert id(waiter) not in got
                continue
            assert list(got.pop(id(waiter)).keys) == ready[: waiter.count]  # type: ignore[attr-defined]
            self.waiters.remove(waiter)
            if waiter.task is not None:
                self.consumed[waiter.task].update(ready[: waiter.count])
        assert not got

    @rule(keys=KEYS, fields=FIELDS, tag=TAGS, repeat=st.booleans())
    def put(self, keys: list[str], fields: list[str], tag: dict[str, int], repeat: bool) -> None:
        self.puts += 1
        block = self.new_block() if fields else None
        header = header_of(fields, len(keys)) if fields else b""
        tags = tuple(dict(tag) for _ in keys)
        for i, key in enumerate(keys):
            self.rows.setdefault(key, {}).update(dict.fromkeys(fields, (self.puts, i)))
            self.tags.setdefault(key, {}).update(tag)
        if block is not None:
            self.content[block.id] = {(f, i): (self.puts, i) for f in fields for i in range(len(keys))}
        self.serve(self.ledger.commit(SESSION, self.puts, "p", tuple(keys), tags, block, header))
        if repeat:
            assert self.ledger.commit(SESSION, self.puts, "p", tuple(keys), tags, block, header) == []

    @rule(keys=KEYS)
    def refused(self, keys: list[str]) -> None:
        with pytest.raises(DuplicateKeyError):
            self.ledger.commit(SESSION, 10**6, "p", (*keys, keys[0]))
        with pytest.raises(BatchError):
            self.ledger.commit(SESSION, 10**6, "p", tuple(keys), ())
        with pytest.raises(WireError):
            self.ledger.commit(SESSION, 10**6, "p", tuple(keys), None, self.new_block(), b"garbage")
        with pytest.raises(WireError):
            self.ledger.commit(
                SESSION, 10**6, "p", tuple(keys), None, self.new_block(), header_of(["x"], len(keys) + 1)
            )

    @rule(keys=st.one_of(st.none(), KEYS))
    def clear(self, keys: list[str] | None) -> None:
        gone = [key for key in (list(self.rows) if keys is None else keys) if key in self.rows]
        assert self.ledger.clear("p", keys) == len(gone)
        for key in gone:
            del self.rows[key], self.tags[key]
            for consumed in self.consumed.values():
                consumed.discard(key)

    @rule(keys=KEYS, fields=FIELDS, keep=st.booleans())
    def locate(self, keys: list[str], fields: list[str], keep: bool) -> None:
        self.last_lease += 1
        there = all(key in self.rows and all(f in self.rows[key] for f in fields) for key in keys)
        if not there:
            with pytest.raises(MissingDataError):
                self.ledger.locate(SESSION, self.last_lease, "p", tuple(keys), tuple(fields))
            return
        found = places(self.ledger.locate(SESSION, self.last_lease, "p", tuple(keys), tuple(fields)), fields)
        for f in fields:
            assert [self.content[b][f, r] for b, r in found[f]] == [self.rows[key][f] for key in keys]
        if keep:
            self.leases[self.last_lease] = {b for f in fields for b, _ in found[f]}
        else:
            self.ledger.blocks.release(SESSION, [self.last_lease])

    @rule(count=st.integers(0, 5), fields=FIELDS, where=TAGS, task=st.sampled_from([None, "s", "t"]))
    def wait(self, count: int, fields: list[str], where: dict[str, int], task: str | None) -> None:
        waiter = Waiter(partition="p", count=count, fields=tuple(fields), where=where, task=task, token=None)
        self.waiters.append(waiter)
        rows = self.ledger.wait(waiter)
        self.serve([(waiter, rows)] if rows is not None else [])

    @rule(number=st.integers(0, 10))
    def leave(self, number: int) -> None:
        if self.waiters:
            self.ledger.forget(self.waiters.pop(number % len(self.waiters)))

    @rule(count=st.integers(1, 3), task=st.sampled_from(["s", "t"]))
    def take_and_give_back(self, count: int, task: str) -> None:
        waiter = Waiter(partition="p", count=count, fields=(), where={}, task=task, token=None)
        rows = self.ledger.wait(waiter)
        if rows is None:
            self.ledger.forget(waiter)
            return
        self.serve(self.ledger.give_back("p", task, np.frombuffer(rows.uids, "<i8")))

    @rule(every=st.booleans())
    def release(self, every: bool) -> None:
        ended = list(self.leases) if every else list(self.leases)[:1]
        self.ledger.blocks.release(SESSION, ended)
        for lease in ended:
            del self.leases[lease]

    @rule(outcome=st.sampled_from(["copied", "copied", "no room", "no gain"]), between=st.one_of(st.none(), KEYS))
    def compact(self, outcome: str, between: list[str] | None) -> None:
        """Rows may be cleared while the unit copies."""
        plans = [(block, self.ledger.plan_compaction(block)) for block in self.ledger.blocks.take_sparse()]
        if between is not None:
            self.clear(between)
        for block, wanted in plans:
            rows = np.frombuffer(wanted.rows, "<i8").tolist()
            assert rows
            new = self.new_block() if outcome == "copied" else None
            if new is not None:
                old = self.content[block.ref.id]
                self.content[new.id] = {(f, i): old[f, r] for f in wanted.fields for i, r in enumerate(rows)}
            made = Compacted(new, header_of(wanted.fields, len(rows)), outcome == "no gain")
            self.ledger.end_compaction(block, wanted, made)
        self.ledger.blocks.retry_compactions()

    @invariant()
    def blocks_go_exactly_when_nobody_needs_them(self) -> None:
        for ref in self.ledger.blocks.take_released():
            assert ref.id not in self.freed
            self.freed.add(ref.id)
        held = self.ledger.blocks.blocks
        assert not self.freed & held.keys()
        leased = {block for blocks in self.leases.values() for block in blocks}
        assert leased <= held.keys()
        for block_id, block in held.items():
            assert block.cells >= 0
            assert block.leases >= 0
            assert block.cells or block.leases, block_id
        assert sum(block.cells for block in held.values()) == sum(len(columns) for columns in self.rows.values())

    @invariant()
    def rows_and_tags_agree(self) -> None:
        rows = self.ledger.list_rows("p", {})
        assert list(rows.keys) == list(self.rows)
        assert [dict(tag) for tag in rows.tags] == list(self.tags.values())
        shared = set.intersection(*(set(columns) for columns in self.rows.values())) if self.rows else set()
        assert set(rows.fields) == shared

    @invariant()
    def every_cell_is_where_its_last_put_left_it(self) -> None:
        for name in "xyz":
            keys = [key for key, columns in self.rows.items() if name in columns]
            found = places(self.ledger.locate(b"invariant", 1, "p", tuple(keys), (name,)), [name])[name] if keys else []
            assert [self.content[b][name, r] for b, r in found] == [self.rows[key][name] for key in keys]
            self.ledger.blocks.release(b"invariant")

    def teardown(self) -> None:
        self.ledger.clear("p", None)
        self.ledger.blocks.release(SESSION)
        assert not self.ledger.blocks.blocks
        assert not self.ledger.row_counts()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_growth_is_amortised_and_slots_are_reused() -> None:
    ledger = Ledger()
    for i in range(3000):
        ledger.commit(SESSION, i, "p", (f"k{i}",), ({"i": i},))
        if i >= 10:
            assert ledger.clear("p", [f"k{i - 10}"]) == 1
    rows = ledger.list_rows("p", {})
    assert rows.keys == tuple(f"k{i}" for i in range(2990, 3000))
    uids = np.frombuffer(rows.uids, "<i8")
    assert (np.diff(uids) > 0).all()


def test_given_back_rows_that_were_made_anew_stay_consumed() -> None:
    ledger = Ledger()

    def take() -> bytes:
        rows = ledger.wait(Waiter(partition="p", count=1, fields=(), where={}, task="t", token=None))
        assert rows is not None
        return rows.uids

    ledger.commit(SESSION, 1, "p", ("a",))
    old = take()
    ledger.clear("p", None)
    ledger.commit(SESSION, 2, "p", ("a",))
    take()
    ledger.give_back("p", "t", np.frombuffer(old, "<i8"))
    assert ledger.wait(Waiter(partition="p", count=1, fields=(), where={}, task="t", token=None)) is None


def test_a_waiter_does_not_count_rows_that_another_of_its_task_was_given() -> None:
    ledger = Ledger()

    def waiter(count: int) -> Waiter:
        return Waiter(partition="p", count=count, fields=(), where={}, task="t", token=count)

    for i in (1, 2):
        ledger.commit(SESSION, i, "p", (f"k{i}",))
    assert ledger.wait(waiter(3)) is None
    assert ledger.wait(waiter(4)) is None
    served: list[tuple[object, tuple[str, ...]]] = []
    for i in range(3, 9):
        served += [(w.token, rows.keys) for w, rows in ledger.commit(SESSION, i, "p", (f"k{i}",))]
    assert served == [(3, ("k1", "k2", "k3")), (4, ("k4", "k5", "k6", "k7"))]


def test_a_copied_block_keeps_the_rows_apart() -> None:
    """Columns of which different rows were overwritten, rows cleared before and during the copy."""
    ledger = Ledger()
    keys = tuple(f"k{i}" for i in range(16))
    ledger.commit(SESSION, 1, "p", keys, None, BlockRef(1, 0, 0, 1 << 16), header_of(["x", "y"], 16))
    ledger.commit(SESSION, 2, "p", keys[:12], None, BlockRef(2, 0, 0, 1 << 16), header_of(["y"], 12))
    assert ledger.blocks.take_sparse() == []
    ledger.clear("p", [*keys[:4], *keys[5:8]])
    block, _ = ledger.blocks.take_sparse()
    plan_made = ledger.plan_compaction(block)
    assert np.frombuffer(plan_made.rows, "<i8").tolist() == [4, *range(8, 16)]
    ledger.clear("p", ["k9"])
    ledger.end_compaction(block, plan_made, Compacted(BlockRef(3, 0, 0, 1 << 15), header_of(["x", "y"], 9)))
    assert [ref.id for ref in ledger.blocks.take_released()] == [1]
    found = places(ledger.locate(SESSION, 1, "p", ("k15", "k4", "k10"), ("x", "y")), ["x", "y"])
    assert found == {"x": [(3, 8), (3, 0), (3, 3)], "y": [(3, 8), (2, 4), (2, 10)]}
    assert ledger.blocks.take_sparse() == []
