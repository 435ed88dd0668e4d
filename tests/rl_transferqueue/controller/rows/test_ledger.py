"""`Ledger` against a model of dictionaries: rows, tags, consumption, leases, and blocks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rl_protocol import BatchData, BatchError, ConflictError, DuplicateKeyError, MissingDataError, WireError, dense
from rl_protocol.wire import plan
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Waiter, Watcher
from rl_transferqueue.wire.arrays import unpack_ints
from rl_transferqueue.wire.messages import Located, TagColumn
from rl_transferqueue.wire.spans import Span
from rl_transferqueue.wire.tags import to_columns, to_rows

KEYS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)
FIELDS = st.lists(st.sampled_from("xyz"), min_size=0, max_size=3, unique=True)
TAGS = st.dictionaries(st.sampled_from("mn"), st.integers(0, 1), max_size=2)
SESSION = b"session."


def header_of(names: list[str] | tuple[str, ...], rows: int) -> bytes:
    batch = BatchData({name: dense(np.zeros((rows, 200), np.float32)) for name in names}, rows)
    return msgspec.msgpack.encode(plan(batch))


def places(located: Located, fields: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Map each column to a (block offset, row in block) for each row."""
    out: dict[str, list[tuple[int, int]]] = {}
    for name, place in zip(fields, located.place_of, strict=True):
        blocks, rows = (np.frombuffer(part, "<i4").tolist() for part in located.places[place])
        out[name] = [(located.blocks[b].span.offset, r) for b, r in zip(blocks, rows, strict=True)]
    return out


class LedgerMachine(RuleBasedStateMachine):
    """Compares one partition with a model.

    For each row, the model records which put wrote each column, and from which row of that put.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        # key -> column -> (put, row of the put)
        self.rows: dict[str, dict[str, tuple[int, int]]] = {}
        self.tags: dict[str, dict[str, int]] = {}
        self.consumed: dict[str, set[str]] = {"s": set(), "t": set()}
        # block -> (column, row) -> (put, row of the put)
        self.content: dict[int, dict[tuple[str, int], tuple[int, int]]] = {}
        self.freed: set[int] = set()
        self.leases: dict[int, set[int]] = {}
        self.waiters: list[Waiter] = []
        self.puts = self.last_block = self.last_lease = self.seen = 0
        self.generations: dict[str, int] = {}
        self.believed: list[tuple[Located, tuple[str, ...], tuple[str, ...]]] = []
        self.changed: set[str] = set()
        self.mirror: dict[str, dict[str, int]] = {}

    def new_block(self) -> Span:
        """Return a new span; its offset identifies the block, so no offset is used twice."""
        self.last_block += 1
        return Span(0, self.last_block << 20, 1 << 16)

    def fits(self, key: str, waiter: Waiter) -> bool:
        tags = self.tags[key]
        return (
            all(f in self.rows[key] for f in waiter.fields)
            and all(tags.get(k) == v for k, v in waiter.where.items())
            and (waiter.task is None or key not in self.consumed[waiter.task])
        )

    def serve(self, served: list[tuple[Waiter, object]]) -> None:
        """Check that waiters get the oldest rows that fit, in order of arrival."""
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

    @rule(keys=KEYS, fields=FIELDS, tag=TAGS)
    def put(self, keys: list[str], fields: list[str], tag: dict[str, int]) -> None:
        self.puts += 1
        block = self.new_block() if fields else None
        header = header_of(fields, len(keys)) if fields else b""
        tags = to_columns(keys, [dict(tag) for _ in keys])
        for i, key in enumerate(keys):
            self.rows.setdefault(key, {}).update(dict.fromkeys(fields, (self.puts, i)))
            self.tags.setdefault(key, {}).update(tag)
        if block is not None:
            self.content[block.offset] = {(f, i): (self.puts, i) for f in fields for i in range(len(keys))}
        generations, served = self.ledger.commit("p", tuple(keys), tags, block, header)
        self.serve(served)
        for key, generation in zip(keys, map(int, generations), strict=True):
            assert self.generations.setdefault(key, generation) == generation
        self.changed.update(keys)

    @rule(keys=KEYS)
    def refused(self, keys: list[str]) -> None:
        with pytest.raises(DuplicateKeyError):
            self.ledger.commit("p", (*keys, keys[0]))
        with pytest.raises(BatchError):
            self.ledger.commit("p", tuple(keys), (TagColumn("m", (1,) * (len(keys) + 1)),))
        with pytest.raises(BatchError):
            self.ledger.commit("p", tuple(keys), (TagColumn("m", (1,), np.array([len(keys)], "<i4").tobytes()),))
        with pytest.raises(WireError):
            self.ledger.commit("p", tuple(keys), (), self.new_block(), b"garbage")
        with pytest.raises(WireError):
            self.ledger.commit("p", tuple(keys), (), self.new_block(), header_of(["x"], len(keys) + 1))

    @rule(keys=KEYS, tag=TAGS, absent=st.booleans())
    def compare_and_set(self, keys: list[str], tag: dict[str, int], absent: bool) -> None:
        expect = [None if absent else tag] * len(keys)
        fits = [
            key not in self.rows
            if absent
            else key in self.rows and all(self.tags.get(key, {}).get(k) == v for k, v in tag.items())
            for key in keys
        ]
        if not all(fits):
            with pytest.raises(ConflictError, match=repr(keys[fits.index(False)])):
                self.ledger.commit("p", tuple(keys), (TagColumn("m", (7,) * len(keys)),), expect=expect)
            return
        _, served = self.ledger.commit("p", tuple(keys), to_columns(keys, [{"m": 1}] * len(keys)), expect=expect)
        for key in keys:
            self.rows.setdefault(key, {})
            self.tags.setdefault(key, {}).update(m=1)
        self.serve(served)
        self.note_generations()
        self.changed.update(keys)

    @rule(keys=KEYS, task=st.sampled_from(["s", "t"]))
    def claim(self, keys: list[str], task: str) -> None:
        if any(key not in self.rows for key in keys):
            with pytest.raises(MissingDataError):
                self.ledger.claim("p", tuple(keys), task)
        elif any(key in self.consumed[task] for key in keys):
            with pytest.raises(ConflictError, match=task):
                self.ledger.claim("p", tuple(keys), task)
        else:
            assert self.ledger.claim("p", tuple(keys), task).keys == tuple(keys)
            self.consumed[task].update(keys)

    @rule(keys=st.one_of(st.none(), KEYS), task=st.sampled_from([None, "s", "t"]))
    def reset(self, keys: list[str] | None, task: str | None) -> None:
        chosen = set(self.rows if keys is None else keys) & set(self.rows)
        tasks = [task] if task is not None else ["s", "t"]
        generations, served = self.ledger.reset_consumption("p", task, keys)
        assert generations.size == sum(any(key in self.consumed[t] for t in tasks) for key in chosen)
        for t in tasks:
            self.consumed[t] -= chosen
        self.serve(served)

    @rule(where=st.one_of(st.just({}), TAGS))
    def look(self, where: dict[str, int]) -> None:
        """Applying all changes since the last look gives the current rows."""
        changes = self.ledger.waiters.changes(Watcher(partition="p", since=self.seen, where={}, token=None))
        if changes.reset:
            self.mirror = {}
        assert not set(changes.removed) & set(changes.rows.keys)
        for key in changes.removed:
            self.mirror.pop(key, None)
        self.mirror.update(zip(changes.rows.keys, to_rows(changes.rows.tags, len(changes.rows.keys)), strict=True))
        assert self.mirror == self.tags
        if self.seen and not changes.reset:
            assert set(changes.rows.keys) == self.changed & set(self.rows)
        narrow = self.ledger.waiters.changes(Watcher(partition="p", since=self.seen, where=where, token=None))
        fitting = [k for k in changes.rows.keys if all(self.tags[k].get(n) == v for n, v in where.items())]
        assert list(narrow.rows.keys) == fitting
        if not narrow.reset:
            assert set(narrow.removed) == set(changes.removed) | set(changes.rows.keys) - set(fitting)
        self.seen, self.changed = changes.version, set()
        nothing = self.ledger.waiters.changes(Watcher(partition="p", since=self.seen, where={}, token=None))
        assert (nothing.rows.keys, nothing.removed, nothing.version, nothing.reset) == ((), (), self.seen, False)

    @rule(keys=st.one_of(st.none(), KEYS))
    def clear(self, keys: list[str] | None) -> None:
        gone = [key for key in (list(self.rows) if keys is None else keys) if key in self.rows]
        assert self.ledger.clear("p", keys) == (len(gone), [])
        for key in gone:
            del self.rows[key], self.tags[key], self.generations[key]
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
        generations = np.array([self.generations[key] for key in keys])
        with pytest.raises(MissingDataError, match=keys[-1]):
            self.ledger.locate(
                SESSION,
                self.last_lease,
                "p",
                tuple(keys),
                tuple(fields),
                generations + (generations == generations[-1]),
            )
        located = self.ledger.locate(SESSION, self.last_lease, "p", tuple(keys), tuple(fields), generations)
        self.believed.append((located, tuple(keys), tuple(fields)))
        found = places(located, fields)
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
        rows = self.ledger.waiters.wait(waiter)
        self.serve([(waiter, rows)] if rows is not None else [])

    @rule(number=st.integers(0, 10))
    def leave(self, number: int) -> None:
        if self.waiters:
            self.ledger.waiters.forget(self.waiters.pop(number % len(self.waiters)))

    @rule(count=st.integers(1, 3), task=st.sampled_from(["s", "t"]))
    def take_and_give_back(self, count: int, task: str) -> None:
        waiter = Waiter(partition="p", count=count, fields=(), where={}, task=task, token=None)
        rows = self.ledger.waiters.wait(waiter)
        if rows is None:
            self.ledger.waiters.forget(waiter)
            return
        self.serve(self.ledger.give_back("p", task, unpack_ints(rows.generations, len(rows.keys))))

    def note_generations(self) -> None:
        rows = self.ledger.list_rows("p", {})
        self.generations = dict(zip(rows.keys, unpack_ints(rows.generations, len(rows.keys)).tolist(), strict=True))

    @rule(every=st.booleans())
    def release(self, every: bool) -> None:
        ended = list(self.leases) if every else list(self.leases)[:1]
        self.ledger.blocks.release(SESSION, ended)
        for lease in ended:
            del self.leases[lease]

    @rule(outcome=st.sampled_from(["copied", "copied", "no room", "no gain"]), between=st.one_of(st.none(), KEYS))
    def compact(self, outcome: str, between: list[str] | None) -> None:
        """Rows may be cleared while the storage unit copies."""
        plans = [(block, self.ledger.plan_compaction(block)) for block in self.ledger.blocks.take_sparse()]
        if between is not None:
            self.clear(between)
        for block, wanted in plans:
            rows = np.frombuffer(wanted.rows, "<i8").tolist()
            assert rows
            new = self.new_block() if outcome == "copied" else None
            if new is not None:
                old = self.content[block.ref.span.offset]
                self.content[new.offset] = {(f, i): old[f, r] for f in wanted.fields for i, r in enumerate(rows)}
            made = (new, header_of(wanted.fields, len(rows))) if new is not None else None
            self.ledger.end_compaction(block, wanted, made, no_gain=outcome == "no gain")
        self.ledger.blocks.retry_compactions()

    @invariant()
    def blocks_go_exactly_when_nobody_needs_them(self) -> None:
        for ref in self.ledger.blocks.take_released():
            assert ref.span.offset not in self.freed
            self.freed.add(ref.span.offset)
        held = {block.ref.span.offset: block for block in self.ledger.blocks.blocks.values()}
        assert self.ledger.blocks.used == len(held) << 16
        assert not self.freed & held.keys()
        leased = {block for blocks in self.leases.values() for block in blocks}
        assert leased <= held.keys()
        for place, block in held.items():
            assert block.cells >= 0
            assert block.cells or block.holders, place
        revoked = self.ledger.blocks.take_revoked()
        known = {block.ref.id: block for block in held.values()}
        for blocks in revoked.values():
            assert all(known[i].cells == 0 and known[i].holders for i in blocks if i in known)

    @invariant()
    def a_place_with_a_current_epoch_is_right(self) -> None:
        """A location stays correct while the epochs of its blocks are unchanged."""
        still = []
        for located, keys, fields in self.believed:
            slots = np.array([ref.slot for ref in located.blocks], np.int64)
            if (self.ledger.blocks.epochs.of(slots) == np.frombuffer(located.epochs, "<i8")).all():
                still.append((located, keys, fields))
                for f, found in places(located, list(fields)).items():
                    assert [self.content[b][f, r] for b, r in found] == [self.rows[key][f] for key in keys]
        self.believed = still[-20:]

    @invariant()
    def the_sum_of_cells_is_right(self) -> None:
        held = self.ledger.blocks.blocks
        assert sum(block.cells for block in held.values()) == sum(len(columns) for columns in self.rows.values())

    @invariant()
    def rows_and_tags_agree(self) -> None:
        rows = self.ledger.list_rows("p", {})
        assert list(rows.keys) == list(self.rows)
        assert list(to_rows(rows.tags, len(rows.keys))) == list(self.tags.values())
        for task, consumed in self.consumed.items():
            flags = self.ledger.consumption("p", task)
            assert [k for k, flag in zip(flags.keys, flags.flags, strict=True) if flag] == [
                k for k in self.rows if k in consumed
            ]
        flags = np.frombuffer(self.ledger.production("p", ("z", "x")).flags, np.bool_).reshape(-1, 2).tolist()
        assert flags == [["z" in columns, "x" in columns] for columns in self.rows.values()]
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
        assert not self.ledger.contents().rows


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_growth_is_amortised_and_slots_are_reused() -> None:
    ledger = Ledger()
    for i in range(3000):
        ledger.commit("p", (f"k{i}",), (TagColumn("i", (i,)),))
        if i >= 10:
            assert ledger.clear("p", [f"k{i - 10}"]) == (1, [])
    rows = ledger.list_rows("p", {})
    assert rows.keys == tuple(f"k{i}" for i in range(2990, 3000))
    generations = unpack_ints(rows.generations, len(rows.keys))
    assert (np.diff(generations) > 0).all()


def test_returned_rows_that_were_recreated_stay_consumed() -> None:
    ledger = Ledger()

    def take() -> bytes:
        rows = ledger.waiters.wait(Waiter(partition="p", count=1, fields=(), where={}, task="t", token=None))
        assert rows is not None
        return rows.generations

    ledger.commit("p", ("a",))
    old = take()
    ledger.clear("p", None)
    ledger.commit("p", ("a",))
    take()
    ledger.give_back("p", "t", np.frombuffer(old, "<i8"))
    assert ledger.waiters.wait(Waiter(partition="p", count=1, fields=(), where={}, task="t", token=None)) is None


def test_a_waiter_does_not_count_rows_that_another_of_its_task_was_given() -> None:
    ledger = Ledger()

    def waiter(count: int) -> Waiter:
        return Waiter(partition="p", count=count, fields=(), where={}, task="t", token=count)

    for i in (1, 2):
        ledger.commit("p", (f"k{i}",))
    assert ledger.waiters.wait(waiter(3)) is None
    assert ledger.waiters.wait(waiter(4)) is None
    served: list[tuple[object, tuple[str, ...]]] = []
    for i in range(3, 9):
        served += [(w.token, rows.keys) for w, rows in ledger.commit("p", (f"k{i}",))[1]]
    assert served == [(3, ("k1", "k2", "k3")), (4, ("k4", "k5", "k6", "k7"))]


def test_a_copied_block_keeps_the_rows_apart() -> None:
    """Rows of one column are overwritten, and rows are cleared before and during the copy."""
    ledger = Ledger()
    keys = tuple(f"k{i}" for i in range(16))
    one, two, three = Span(0, 1 << 20, 1 << 16), Span(0, 2 << 20, 1 << 16), Span(0, 3 << 20, 1 << 15)
    ledger.commit("p", keys, (), one, header_of(["x", "y"], 16))
    ledger.commit("p", keys[:12], (), two, header_of(["y"], 12))
    assert ledger.blocks.take_sparse() == []
    ledger.clear("p", [*keys[:4], *keys[5:8]])
    block, _ = ledger.blocks.take_sparse()
    plan_made = ledger.plan_compaction(block)
    assert np.frombuffer(plan_made.rows, "<i8").tolist() == [4, *range(8, 16)]
    ledger.clear("p", ["k9"])
    ledger.end_compaction(block, plan_made, (three, header_of(["x", "y"], 9)))
    assert [ref.span for ref in ledger.blocks.take_released()] == [one]
    found = places(ledger.locate(SESSION, 1, "p", ("k15", "k4", "k10"), ("x", "y")), ["x", "y"])
    a, b = two.offset, three.offset
    assert found == {"x": [(b, 8), (b, 0), (b, 3)], "y": [(b, 8), (a, 4), (a, 10)]}
    assert ledger.blocks.take_sparse() == []
