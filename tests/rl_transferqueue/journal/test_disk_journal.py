"""Conformance of journals, and what holds only for the one on a disk."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forked import forked
from journal_model import SEGMENT_BYTES as SEGMENT
from journal_model import opened, recovered
from lossy_disk import LossyDisk
from lossy_files import LossyFiles
from msgspec import msgpack

from rl_protocol.errors import ConfigError, OutputError
from rl_protocol.support.fault_points import FaultPoint, armed_for
from rl_transferqueue.journal.disk_journal import (
    check_journal,
    file_system_of,
    open_journal,
    remove_journal,
)
from rl_transferqueue.journal.journal_index import JournalIndex
from rl_transferqueue.journal.records import ClearRecord, Journal, Origin, PutRecord
from rl_transferqueue.journal.segment_files import MOST_OPEN
from rl_transferqueue.wire.arrays import unpack_ints
from rl_transferqueue.wire.messages import TagColumn

Reopen = Callable[[], Journal]


def put(*generations: int, **columns: bytes) -> PutRecord:
    keys = tuple(f"row {it}" for it in generations)
    tags = msgpack.encode((TagColumn("t", (1,) * len(generations)),))
    return PutRecord(partition="train", keys=keys, generations=generations, tags=tags, columns=columns)


@pytest.fixture(params=["disk", "power loss"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Opens the journal; again if it was open: its files as they are, or after a power loss."""
    stack = ExitStack()
    disk = LossyDisk()

    def on_disk() -> Journal:
        stack.close()
        return stack.enter_context(open_journal(tmp_path / "journal", SEGMENT))

    def in_memory() -> Journal:
        nonlocal disk
        stack.close()
        disk = disk.after_power_loss(random.Random(0))
        return stack.enter_context(opened(LossyFiles(disk)))

    with stack:
        yield on_disk if request.param == "disk" else in_memory


def test_a_new_journal_is_empty(reopen: Reopen) -> None:
    found = reopen().recover()
    assert (found.puts, found.cleared, found.report.rows_kept, found.report.segments_removed) == ((), frozenset(), 0, 0)


def test_synced_puts_come_back_in_order_with_their_bytes(reopen: Reopen) -> None:
    records = [put(1, 2, ids=b"abc", empty=b""), put(3), put(1, score=b"x" * 10_000)]
    journal = reopen()
    journal.recover()
    journal.append(records[:2])
    journal.append(records[2:])
    journal.sync()
    found = recovered(reopen())
    assert list(found.puts) == records
    assert found.report.rows_kept == 3


def test_puts_that_were_not_synced_are_gone_and_their_bytes_cut(reopen: Reopen) -> None:
    journal = reopen()
    journal.recover()
    journal.append([put(1, ids=b"a" * 100)])
    journal.sync()
    journal.append([put(2, ids=b"b" * 100)])
    found = reopen().recover()
    assert [it.generations for it in found.puts] == [(1,)]
    # the first put ends at 100, the second at 512 + 100; a power loss may have taken its sector
    assert found.report.bytes_cut in (0, 512)


def test_a_put_is_kept_until_its_last_row_is_cleared(reopen: Reopen) -> None:
    journal = reopen()
    journal.recover()
    journal.append([put(1, 2, ids=b"ab"), ClearRecord((1, 77))])
    journal.sync()
    journal = reopen()
    found = journal.recover()
    assert [it.generations for it in found.puts] == [(1, 2)]
    assert (found.cleared, found.report.rows_kept) == ({1}, 1)
    journal.append([ClearRecord((2,))])
    journal.sync()
    found = reopen().recover()
    assert (found.puts, found.cleared) == ((), frozenset())


def test_a_read_returns_whole_puts_and_names_later_ones_of_their_rows(reopen: Reopen) -> None:
    records = [put(1, 2, ids=b"ab"), put(3, ids=b"c"), put(2, 4, score=b"de"), put(4), put(5, 6, ids=b"f" * 5000)]
    bare = [replace(it, columns={}) for it in records]
    journal = reopen()
    journal.recover()
    journal.append(records)

    def read(*generations: int) -> list[tuple[PutRecord, tuple[PutRecord, ...]]]:
        found = journal.find(generations, lambda _: True)
        columns = journal.read([it.number for it in found])
        assert [it.nbytes for it in found] == [sum(map(len, (columns[it.number] or {}).values())) for it in found]
        return [(replace(it.put, columns=columns[it.number] or {}), it.later) for it in found]

    assert read(1) == [(records[0], (bare[2],))], "2 is in a later put"
    assert read(4) == [(records[2], ())], "the other put of 4 has no columns"
    assert read(2) == [(records[0], (bare[2],)), (records[2], ())]
    assert [it.put for it in journal.find([2], lambda it: it != bare[0])] == [bare[2]]
    assert read(3, 6) == [(records[1], ()), (records[4], ())]
    gone = journal.find([5], lambda _: True)[0].number
    journal.append([ClearRecord((2, 5, 6))])
    assert journal.read([gone]) == {gone: None}
    assert read(1) == [(records[0], ())]
    assert read() == read(77) == []
    journal.sync()
    journal = reopen()
    assert [it.columns for it in journal.recover().puts] == [{}] * (len(records) - 1)
    assert read(4) == [(records[2], ())]


def test_compaction_keeps_the_live_rows_and_removes_their_old_segments(reopen: Reopen) -> None:
    journal = reopen()
    journal.recover()
    for generation in range(1, 13):
        journal.append([put(generation, ids=bytes([generation]) * 1000)])
    journal.append([ClearRecord(tuple(it for it in range(1, 13) if it % 4))])
    journal.sync()
    assert journal.compact() == 2
    found = recovered(reopen())
    assert {it.generations: bytes(it.columns["ids"]) for it in found.puts} == {
        (it,): bytes([it]) * 1000 for it in (4, 8, 12)
    }


def test_a_compaction_without_sparse_segments_looks_at_no_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_journal(tmp_path, SEGMENT) as journal:
        journal.recover()
        journal.append([put(1, ids=bytes(SEGMENT)), put(2, ids=bytes(SEGMENT)), ClearRecord((2,))])

        def refuse(*_: object) -> None:
            raise AssertionError("a plane has as many puts as rows, and compacts after each clear")

        monkeypatch.setattr(JournalIndex, "puts_in", refuse)
        assert journal.compact() == 0


def test_a_put_is_kept_until_its_columns_and_tags_are_replaced(reopen: Reopen) -> None:
    def tagged(*generations: int, tags: str = "", **columns: bytes) -> PutRecord:
        written = tuple(TagColumn(name, (0,) * len(generations)) for name in tags)
        return replace(put(*generations, **columns), tags=msgpack.encode(written))

    def of_some_rows(record: PutRecord, *rows: int) -> PutRecord:
        tag = TagColumn("m", (0,) * len(rows), np.array(rows, "<i4").tobytes())
        return replace(record, tags=msgpack.encode((tag,)))

    records = [
        tagged(1, 2, tags="n", x=b"ab", y=b"cd"),
        tagged(1, tags="n", x=b"e"),  # y of row 1 is in the first put alone
        of_some_rows(put(1, 2), 1),
        tagged(1, tags="n", x=b"f", y=b"g"),  # replaces the second put
        tagged(2, x=b"h", y=b"i"),  # n of row 2 is in the first put alone
        tagged(2, tags="n"),  # replaces the first put
        tagged(3),
        tagged(3),  # replaces the one before
        tagged(4, 5, z=b"jk"),
        tagged(4, z=b"l"),
    ]
    needed = [2, 3, 4, 5, 7, 8, 9]
    journal = reopen()
    journal.recover()
    journal.append(records)
    assert [it.put.generations for it in journal.find([1, 2], lambda _: True)] == [(1,), (2,)]
    journal.sync()
    journal = reopen()
    assert list(recovered(journal).puts) == [records[i] for i in needed]
    journal.append([ClearRecord((5,)), of_some_rows(put(1, 2), 1)])
    journal.sync()
    found = recovered(reopen())
    assert list(found.puts) == [records[i] for i in needed if i not in (2, 8)] + [of_some_rows(put(1, 2), 1)]
    assert (found.cleared, found.report.rows_kept) == (frozenset(), 4)


def test_rows_that_are_written_again_and_again_take_no_more_room(tmp_path: Path) -> None:
    def written(count: int) -> tuple[int, int]:
        with open_journal(tmp_path / str(count), SEGMENT) as journal:
            journal.recover()
            journal.append([put(1, 2, x=b"a" * 100, y=b"b" * 100)])
            for n in range(count):
                journal.append([put(1, x=n.to_bytes(4, "little") * 200), put(2)])
                journal.sync()
                journal.compact()
            segments = sum(1 for _ in (tmp_path / str(count) / "segments").iterdir())
        with open_journal(tmp_path / str(count), SEGMENT) as journal:
            found = recovered(journal)
        assert bytes(found.puts[-2].columns["x"]) == (count - 1).to_bytes(4, "little") * 200
        return segments, len(found.puts)

    assert written(20) == written(300)
    assert written(300)[1] == 3


COMPACTION = """
import sys
from pathlib import Path
from rl_transferqueue.journal.disk_journal import open_journal
from rl_transferqueue.journal.records import ClearRecord, PutRecord
with open_journal(Path(sys.argv[1]), 1 << 14) as journal:
    journal.recover()
    for it in range(1, 41):
        data = it.to_bytes(8, "little") * 100
        journal.append([PutRecord(partition="p", keys=(str(it),), generations=(it,), columns={"x": data})])
        if it % 4:
            journal.append([PutRecord(partition="p", keys=(str(it),), generations=(it,), columns={"x": data[::-1]})])
            journal.append([ClearRecord((it,))] if it % 4 == 2 else [])
        journal.sync()
    print("synced", flush=True)
    print(journal.compact(), flush=True)
"""


@pytest.mark.parametrize("in_compaction", [False, True])
def test_a_kill_in_the_middle_of_a_compaction_loses_nothing(tmp_path: Path, in_compaction: bool) -> None:
    """The copies are durable and the metadata names the old blocks; `compact` syncs first."""
    armed = armed_for(FaultPoint.JOURNAL_PAYLOAD_SYNCED, 40 + 1 + in_compaction, tmp_path / "reached")
    command = [sys.executable, "-c", COMPACTION, str(tmp_path / "journal")]
    ended = subprocess.run(command, env=os.environ | armed, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("synced\n", -signal.SIGKILL), ended.stderr
    assert (tmp_path / "reached").exists()
    values = {it: it.to_bytes(8, "little") * 100 for it in range(1, 41) if it % 4 != 2}
    wanted = {it: data[::-1] if it % 4 else data for it, data in values.items()}
    for removed in (True, False):
        with open_journal(tmp_path / "journal", 1 << 14) as journal:
            found = recovered(journal)
            assert {it.generations[0]: bytes(it.columns["x"]) for it in found.puts} == wanted
            assert (found.report.rows_kept, found.report.rows_incomplete) == (len(wanted), ())
            assert (journal.compact() > 0) == removed, "the next one ends what was cut"


def test_a_failed_sync_ends_the_journal() -> None:
    files = LossyFiles(LossyDisk())
    with opened(files) as journal:
        journal.recover()
        journal.append([put(1, ids=b"a")])
        files.broken_sync = True
        with pytest.raises(OutputError, match=r"memory failed during sync: .*Input/output error"):
            journal.sync()
        files.broken_sync = False
        with pytest.raises(OutputError, match="failed during sync"):
            journal.sync()
    with opened(files) as journal:
        assert not journal.recover().puts


def test_a_full_disk_refuses_the_append_and_nothing_else() -> None:
    with opened(LossyFiles(LossyDisk(), capacity=2 * SEGMENT + 100)) as journal:
        journal.recover()
        journal.append([put(1, ids=b"a" * 4000)])
        with pytest.raises(OutputError, match=r"memory needs 4096 bytes .* 100 are free"):
            journal.append([put(2, ids=b"b" * 4000)])
        journal.append([put(3, ids=b"c")])
        journal.sync()


def test_a_disk_without_room_for_the_first_segments_is_refused_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path).free
    monkeypatch.setattr("rl_transferqueue.journal.disk_journal.SEGMENT_BYTES", free)
    with pytest.raises(ConfigError, match=rf"journal_dir={tmp_path}/new needs {2 * free} bytes .* and \d+ are free\."):
        check_journal(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with open_journal(tmp_path / "full", SEGMENT):
        pass
    remove_journal(tmp_path / "full")  # needs none
    assert not (tmp_path / "full").exists()
    monkeypatch.setattr("rl_transferqueue.journal.disk_journal.SEGMENT_BYTES", 4096)
    check_journal(tmp_path / "new")


def _fill(journal: Journal) -> None:
    for generation in range(100):
        journal.append([put(generation, ids=bytes(100_000))])


def test_a_real_full_disk_refuses_the_append(tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"can't mount a small tmpfs: {mount.stderr.strip()}")
    try:
        with open_journal(tmp_path / "journal", 128 << 10) as journal:
            journal.recover()
            with pytest.raises(OutputError, match=r"needs 131072 bytes .*No space left on device"):
                _fill(journal)
            journal.sync()
        with open_journal(tmp_path / "journal", 128 << 10) as journal:
            assert 1 <= journal.recover().report.rows_kept < 10
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what is open can't be listed")
def test_a_journal_of_many_segments_opens_few_at_once(tmp_path: Path) -> None:
    def opened() -> int:
        places = list[str]()
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(FileNotFoundError):  # that of the listing
                places.append(str(link.readlink()))
        return sum(place.startswith(f"{tmp_path}/") for place in places)

    segments = MOST_OPEN + 16
    with open_journal(tmp_path, SEGMENT) as journal:
        journal.recover()
        for generation in range(1, segments + 1):
            journal.append([put(generation, ids=bytes([generation]) * SEGMENT)])
            journal.sync()
        assert 1 < opened() <= MOST_OPEN + 4  # with the lock and the state
    with open_journal(tmp_path, SEGMENT) as journal:
        assert journal.recover().report.rows_kept == segments
        for generation in range(1, segments + 1):
            (found,) = journal.find([generation], lambda _: True)
            assert journal.read([found.number]) == {found.number: {"ids": bytes([generation]) * SEGMENT}}
        assert 1 < opened() <= MOST_OPEN + 4


def test_a_flipped_byte_costs_its_put_alone(tmp_path: Path) -> None:
    with open_journal(tmp_path, SEGMENT) as journal:
        journal.recover()
        journal.append([put(1, ids=b"a" * 64), put(2, ids=b"b" * 64)])
        journal.sync()
    segment = next((tmp_path / "segments").glob("segment-*0"))
    with segment.open("r+b") as file:
        file.seek(70)
        file.write(b"?")
    for incomplete in ((2,), ()):
        with open_journal(tmp_path, SEGMENT) as journal:
            found = journal.recover()
        assert [it.generations for it in found.puts] == [(1,)]
        assert (found.report.rows_kept, found.report.rows_incomplete) == (1, incomplete)


def test_a_second_process_and_network_file_systems_are_refused(tmp_path: Path) -> None:
    with open_journal(tmp_path), pytest.raises(ConfigError, match="in use by another process"), open_journal(tmp_path):
        pass
    mounts = "1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / /a rw - nfs4 h:/x rw"
    assert [file_system_of(Path(it), mounts) for it in ("/a", "/a/b", "/ab")] == ["nfs4", "nfs4", "ext4"]


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_journal_that_was_closed_is_free_while_a_forked_process_lives(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with open_journal(tmp_path):
            stack.enter_context(forked())
        with open_journal(tmp_path):
            pass


def test_names_of_the_folders_above_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("rl_transferqueue.journal.disk_journal.fsync", synced.append)
    with open_journal(tmp_path / "run" / "journal"):
        pass
    assert {tmp_path, tmp_path / "run", tmp_path / "run" / "journal"} <= set(synced)


WRITER = """
import sys
from pathlib import Path
from rl_transferqueue.journal.disk_journal import open_journal
from rl_transferqueue.journal.records import PutRecord
with open_journal(Path(sys.argv[1]), 1 << 16) as journal:
    journal.recover()
    for it in range(int(sys.argv[2]), 1 << 30):
        data = it.to_bytes(8, "little") * 500
        journal.append([PutRecord(partition="p", keys=(str(it),), generations=(it,), columns={"ids": data})])
        journal.sync()
        print(it, flush=True)
"""


def test_acknowledged_rows_survive_kill_9(tmp_path: Path) -> None:
    last = -1
    for life in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(last + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as writer:
            assert writer.stdout is not None
            acknowledged = [writer.stdout.readline() for _ in range(20 + 7 * life)]
            writer.kill()
            acknowledged += writer.stdout.readlines()  # communicate would miss what readline has buffered
        last = max(last, *map(int, acknowledged), 0)
        with open_journal(tmp_path, 1 << 16) as journal:
            found = recovered(journal)
        rows = {it.generations[0]: bytes(it.columns["ids"]) for it in found.puts}
        assert set(range(last + 1)) <= rows.keys()
        assert len(rows) <= last + 2
        assert all(data == it.to_bytes(8, "little") * 500 for it, data in rows.items())
        assert not found.report.rows_incomplete
        last = max(rows)


def test_a_journal_is_removed_with_its_folder_unless_that_has_other_files(tmp_path: Path) -> None:
    for other in (False, True):
        with open_journal(tmp_path / "journal", SEGMENT) as journal:
            journal.recover()
            journal.append([put(1, x=b"a")])
            journal.sync()
            with pytest.raises(ConfigError, match="in use by another process"):
                remove_journal(tmp_path / "journal")
        if other:
            (tmp_path / "journal" / "mine").touch()
        remove_journal(tmp_path / "journal")
        assert [path.name for path in tmp_path.rglob("*")] == (["journal", "mine"] if other else [])


class Cut(BaseException):
    """The process ends here."""


def cut_removal(folder: Path, after: int) -> bool:
    """Remove a journal, but end before the call number `after` that changes the file system."""
    calls = itertools.count()

    def cutting(change: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            if next(calls) == after:
                raise Cut
            change(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "rmdir", "fsync"):
            patch.setattr(os, name, cutting(getattr(os, name)))
        try:
            remove_journal(folder)
        except Cut:
            return True
    return False


@pytest.mark.parametrize("opened_again", [False, True])
def test_a_removal_that_was_cut_anywhere_is_finished(tmp_path: Path, opened_again: bool) -> None:
    folder, kept, after = tmp_path / "journal", list[int](), 0
    while True:
        with open_journal(folder, SEGMENT) as journal:
            journal.recover()
            journal.append([put(1, x=b"a"), put(2, x=b"b" * SEGMENT)])
            journal.sync()
        was_cut = cut_removal(folder, after)
        if was_cut and opened_again:
            with open_journal(folder, SEGMENT) as journal:
                report = journal.recover().report
            assert report.rows_incomplete == ()
            kept.append(report.rows_kept)
        remove_journal(folder)
        assert not folder.exists()
        if not was_cut:
            break
        after += 1
    assert after >= 6, "the metadata, two segments, their folder, the lock and the folder"
    assert not kept or kept == [2] + [0] * (after - 1), "rows are there until the metadata is not"


def test_a_folder_without_a_journal_is_not_removed(tmp_path: Path) -> None:
    mine = tmp_path / "segments" / "mine"
    mine.parent.mkdir()
    mine.touch()
    remove_journal(tmp_path)
    assert mine.exists()
    remove_journal(tmp_path / "absent")


def test_a_check_waits_for_a_process_that_is_ending(tmp_path: Path) -> None:
    with open_journal(tmp_path, SEGMENT):
        pass
    held = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="in use by another process"):
        check_journal(tmp_path, wait_s=0.2)
    timer = threading.Timer(0.3, os.close, [held])
    timer.start()
    check_journal(tmp_path, wait_s=60)
    timer.join()


def test_the_answers_to_the_last_puts_of_each_session_are_kept(tmp_path: Path) -> None:
    sessions = (b"session1", b"session2")
    with open_journal(tmp_path) as journal:
        journal.recover()
        for number in range(1, 301):
            for row, session in enumerate(sessions[: 1 + (number <= 10)]):
                generation = 2 * number + row
                journal.append([replace(put(generation), origin=Origin(session, number))])
            journal.sync()
        journal.append([ClearRecord(tuple(range(700)))])
        journal.sync()
        journal.append([replace(put(9000), origin=Origin(sessions[0], 301))])  # never synced
    with open_journal(tmp_path, keep_answers=True) as journal:
        found = journal.recover()
        assert found.puts == ()
        assert found.last_generation == 600
        wanted = {Origin(sessions[0], number): 2 * number for number in range(45, 301)}
        wanted |= {Origin(sessions[1], number): 2 * number + 1 for number in range(1, 11)}
        assert {origin: unpack_ints(packed, 1).tolist() for origin, packed in found.answers.items()} == {
            origin: [generation] for origin, generation in wanted.items()
        }
        journal.append([replace(put(9001, 9002), origin=Origin(sessions[0], 302))])
        journal.sync()
    with open_journal(tmp_path, keep_answers=True) as journal:
        kept = journal.recover().answers
        assert min(kept) == Origin(sessions[0], 46)
        assert unpack_ints(kept[Origin(sessions[0], 302)], 2).tolist() == [9001, 9002]
    with open_journal(tmp_path) as journal:  # another plane has other sessions
        assert journal.recover().answers == {}
