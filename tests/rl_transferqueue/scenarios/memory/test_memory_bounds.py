"""Caches and histories are bounded in bytes, whatever clients send."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from network_helpers import NO_KEY

from rl_protocol.wire import ColumnHeader, Header
from rl_transferqueue.client.location_cache import Location, LocationCache, RowQuery
from rl_transferqueue.controller.column_counters import OTHER_COLUMNS, ColumnCounters
from rl_transferqueue.controller.rows.block_table import BlockTable
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Watcher
from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.memory.block_epochs import Epochs
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.wire.header_cache import HeaderCache
from rl_transferqueue.wire.messages import Fence, Located, TagColumn
from rl_transferqueue.wire.spans import BlockRef, Span

MIB = 1 << 20


@contextmanager
def growth_below(mib: float) -> Iterator[None]:
    """Check that Python memory grows by less than `mib` MiB inside the `with` block."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < mib * MIB
    finally:
        tracemalloc.stop()


def header(columns: int, variant: int, name: str = "column") -> bytes:
    """Return a header for one row; variants have the same column names but different shapes."""
    specs = tuple(
        ColumnHeader(f"{name}_{i}", "dense", "uint8", (64 + variant,), ((i * 64, 64 + variant),))
        for i in range(columns)
    )
    return msgspec.msgpack.encode(Header(1, 64, specs))


def blank_watcher(partition: str, since: int) -> Watcher:
    return Watcher(partition=partition, since=since, where={}, token=None)


def test_puts_of_many_columns_leave_no_headers_behind() -> None:
    """40 puts of 1,500 columns, each cleared; one decoded header takes 0.9 MiB."""
    ledger, tally = Ledger(), ColumnCounters()
    ledger.commit("p", ("stays",))
    with growth_below(24):
        for number in range(40):
            packed = header(1500, number)
            ledger.commit("p", ("row",), (), Span(0, 0, 64), packed)
            tally.put(packed)
            ledger.clear("p", ("row",))
    assert ledger.blocks.used == 0


def test_headers_that_blocks_share_are_kept_as_long_as_one_of_these_blocks() -> None:
    table = BlockTable(Epochs(16))
    first, second = (table.add(Span(0, 0, 64), bytes(bytearray(b"header")), "p", 1) for _ in range(2))
    assert first.header is second.header
    table.drop_cells([(np.array([first.ref.slot]), 1)])
    third = table.add(Span(0, 0, 64), bytes(bytearray(b"header")), "p", 1)
    assert third.header is second.header
    with growth_below(1):
        for number in range(100):
            block = table.add(Span(0, 0, 64), b"%d" % number + bytes(100_000), "p", 1)
            table.drop_cells([(np.array([block.ref.slot]), 1)])
    assert table.by_partition == {"p": 128}


def test_a_header_cache_keeps_what_is_used_and_stays_within_its_bound() -> None:
    made: list[bytes] = []

    def make(packed: bytes) -> int:
        made.append(packed)
        return len(packed)

    # Two generations of ten headers of 100 bytes each.
    cache = HeaderCache(make, most_bytes=2 * 16 * 10 * (100 + 16))
    for number in range(100):
        assert cache(b"%100d" % number) == 100
        assert cache(b"used" + bytes(96)) == 100
    assert len(cache) <= 20
    assert made.count(b"used" + bytes(96)) == 1
    assert len(made) == 101
    cache(bytes(5000))
    cache(bytes(5000))
    assert made.count(bytes(5000)) == 2  # larger than a generation


def test_cleared_keys_are_remembered_by_their_bytes() -> None:
    ledger = Ledger()
    _, _ = ledger.commit("p", ("stays",))
    version = ledger.waiters.changes(blank_watcher("p", 0)).version
    with growth_below(4):
        for number in range(200):
            key = f"{number}" + "k" * 100_000
            ledger.commit("p", (key,))
            ledger.clear("p", (key,))
    # A watcher learns from `reset` that removed keys were forgotten.
    assert ledger.waiters.changes(blank_watcher("p", version)).reset


def test_emptied_partitions_are_remembered_by_their_bytes() -> None:
    ledger = Ledger()
    with growth_below(4):
        for number in range(200):
            partition = f"{number}" + "p" * 100_000
            ledger.commit(partition, ("a",))
            ledger.clear(partition, None)
    ledger.commit("last", ("a",))
    version = ledger.waiters.changes(blank_watcher("last", 0)).version
    ledger.clear("last", None)
    assert ledger.waiters.changes(blank_watcher("last", version)).reset


def test_long_tags_are_not_kept_for_rows_to_come() -> None:
    ledger = Ledger()
    ledger.commit("p", ("a",), (TagColumn("t", ("",)),))
    with growth_below(4):
        for number in range(200):
            ledger.commit("p", ("a",), (TagColumn("t", (f"{number}" + "t" * 100_000,)),))


def test_columns_of_rows_that_are_gone_do_not_pile_up() -> None:
    ledger = Ledger()
    ledger.commit("p", ("stays",))
    for number in range(500):
        ledger.commit("p", ("a",), (), Span(0, 0, 64), header(4, 0, f"name{number}"))
        ledger.clear("p", ("a",))
    assert len(ledger.contents().columns["p"]) < 100
    ledger.commit("p", ("a",), (), Span(0, 0, 64), header(1, 0))
    for _ in range(100):
        ledger.commit("p", ("b",))
        ledger.clear("p", ("b",))
    assert "column_0" in ledger.contents().columns["p"]


def test_columns_are_counted_by_name_up_to_a_number() -> None:
    tally = ColumnCounters()
    tally.put(header(2, 0))
    for number in range(20):
        tally.put(header(500, 0, f"name{number}"))
    tally.located(("column_0", "x" * 1000), 7)
    counts = tally.columns()
    assert len(counts) <= 4097
    assert (counts["column_0"].rows_written, counts["column_0"].rows_located) == (1, 7)
    assert sum(count.rows_written for count in counts.values()) == 2 + 20 * 500
    assert counts[OTHER_COLUMNS].rows_located == 7


def test_cancelled_timers_do_not_wait_for_their_time() -> None:
    reactor = Reactor()
    fired: list[str] = []
    reactor.call_later(0, lambda: fired.append("due"))
    kept = reactor.call_later(1e6, lambda: None)
    with growth_below(0.5):
        for _ in range(20_000):
            reactor.call_later(1e6, lambda: None).cancel()
    reactor.call_later(0, reactor.stop)
    reactor.run()
    assert fired == ["due"]
    kept.cancel()
    kept.cancel()


def test_ended_sessions_of_other_hosts_are_remembered_up_to_a_number() -> None:
    server = BulkServer(Reactor(), "127.0.0.1", NO_KEY)
    try:
        for number in range(70_000):
            server.fence(Fence(number.to_bytes(8, "little"), (), True, 0))
        assert len(server._barred) == 1 << 16
        assert (69_999).to_bytes(8, "little") in server._barred
    finally:
        server.close()


class Still:
    """Epochs that never change."""

    def unchanged(self, slots: object, epochs: object) -> bool:
        return True


def test_a_client_remembers_places_of_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    located = Located((BlockRef(1, Span(0, 0, 64), 1),), np.zeros(1, "<i8").tobytes(), (b"",), (0,), (), ())
    locations = LocationCache(Still())  # type: ignore[arg-type]

    def query(name: str, rows: int) -> RowQuery:
        return name, ("k",) * rows, ("x",), ()

    def keep(name: str, rows: int) -> None:
        locations.keep(query(name, rows), Location(located, Anchor()))

    for number in range(10):
        keep(f"p{number}", 100_000)
    assert [locations.find(query(f"p{number}", 100_000)) is not None for number in range(10)] == [False] * 8 + [
        True
    ] * 2
    keep("huge", 1_000_000)
    assert locations.find(query("huge", 1_000_000)) is not None
    assert locations.find(query("p9", 100_000)) is None
    for number in range(70):
        keep(f"small{number}", 1)
    assert sum(locations.find(query(f"small{number}", 1)) is not None for number in range(70)) == 64
    locations.forget_partition("small69")
    keep("small69", 1)
    locations.forget_blocks([1])
    assert locations.find(query("small69", 1)) is None
