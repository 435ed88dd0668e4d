"""A journal whose power goes or whose process dies at random, checked against a reference."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import lossy_sqlite
import numpy as np
from lossy_disk import LossyDisk, PowerLossError
from lossy_files import LossyFiles
from msgspec import msgpack

from rl_protocol import BatchData, dense
from rl_protocol.wire import plan
from rl_transferqueue.journal.disk_journal import DiskJournal
from rl_transferqueue.journal.metadata import Metadata
from rl_transferqueue.journal.records import ClearRecord, Journal, PutRecord, Record, Recovered
from rl_transferqueue.wire.messages import TagColumn

SEGMENT_BYTES = 4096
LIVES = 4


class Reference:
    """What was appended, and how much of it must have survived."""

    def __init__(self) -> None:
        self.puts: dict[bytes, PutRecord] = {}
        self.written: dict[bytes, dict[int, set[str]]] = {}
        """What each put has written, by row."""
        self.acknowledged: set[bytes] = set()
        self.cleared: set[int] = set()
        self.cleared_for_sure: set[int] = set()
        self.generation = 0

    def put(self, rng: random.Random) -> PutRecord:
        if self.generation and rng.random() < 0.3:
            generations = (rng.randint(1, self.generation),)
            if generations[0] in self.cleared:
                return self.put(rng)
        else:
            rows = rng.randint(1, 3)
            generations = tuple(range(self.generation + 1, self.generation + rows + 1))
            self.generation += rows
        columns = {f"column {i}": rng.randbytes(rng.choice([0, 1, 63, 600, 1500])) for i in range(rng.randint(0, 3))}
        if rng.random() < 0.05:
            columns["large"] = rng.randbytes(2 * SEGMENT_BYTES)
        written = {it: {f"column {name}" for name in columns} for it in generations}
        header = b""
        if columns and rng.random() < 0.5:
            header = msgpack.encode(plan(BatchData({name: dense(np.zeros(len(generations))) for name in columns})))
            columns = {"payload": b"".join(columns.values())}
        tag = self._tags(rng, written)
        record = PutRecord(
            partition="train",
            keys=tuple(map(str, generations)),
            generations=generations,
            header=header,
            tags=tag,
            columns=columns,
        )
        self.puts[tag], self.written[tag] = record, written
        return record

    def _tags(self, rng: random.Random, written: dict[int, set[str]]) -> bytes:
        """Tags of some of the rows, and one of all rows with a value that no other put has."""
        tags: list[TagColumn] = []
        for name in rng.sample("abc", rng.randint(0, 2)):
            rows = sorted(rng.sample(range(len(written)), rng.randint(1, len(written))))
            tags.append(
                TagColumn(name, (0,) * len(rows), b"" if len(rows) == len(written) else np.array(rows, "<i4").tobytes())
            )
            for row in rows:
                written[list(written)[row]].add(f"tag {name}")
        return msgpack.encode((*tags, TagColumn("unique", (rng.getrandbits(60),) * len(written))))

    def clear(self, rng: random.Random) -> ClearRecord:
        gone = tuple(rng.randint(1, self.generation + 1) for _ in range(rng.randint(1, 4)))
        self.cleared.update(it for it in gone if it <= self.generation)
        return ClearRecord(gone)

    def acknowledge(self) -> None:
        self.acknowledged = set(self.puts)
        self.cleared_for_sure = set(self.cleared)

    def check(self, found: Recovered) -> None:
        """Fail on a loss, and take what was found as the truth from here on."""
        assert not found.report.rows_incomplete
        tags = [put.tags for put in found.puts]
        assert tags == [tag for tag in self.puts if tag in set(tags)]
        for put in found.puts:
            assert replace(put, columns={}) == replace(self.puts[put.tags], columns={})
            assert dict(put.columns) == dict(self.puts[put.tags].columns)
        for tag in self.puts:
            if tag in self.acknowledged and self._needed(tag, self.cleared, set(tags)):
                assert tag in tags
            if not self._needed(tag, self.cleared_for_sure, self.acknowledged):
                assert tag not in tags
        held = {it for put in found.puts for it in put.generations}
        assert self.cleared_for_sure & held <= found.cleared <= self.cleared
        assert found.report.rows_kept == len(held - found.cleared)
        gone = {it for tag, put in self.puts.items() if tag not in tags for it in put.generations} - held
        self.puts = {tag: self.puts[tag] for tag in tags}
        self.cleared = set(found.cleared) | gone
        self.acknowledge()

    def _needed(self, tag: bytes, cleared: set[int], puts: set[bytes]) -> bool:
        """Whether a put has columns or tags of a row that is not cleared, and that no later one of
        `puts` has written, or a row that none of these has."""
        order = list(self.puts)
        later = [it for it in order[order.index(tag) + 1 :] if it in puts]
        for row, names in self.written[tag].items():
            rest = [self.written[it][row] for it in later if row in self.written[it]]
            if row not in cleared and (not rest or not names.issubset(set[str]().union(*rest))):
                return True
        return False


def recovered(journal: Journal) -> Recovered:
    """What a journal holds, with the bytes of the columns."""
    found = journal.recover()
    rows = {it for put in found.puts for it in put.generations}
    puts = journal.find(rows, lambda _: True)
    columns = journal.read([it.number for it in puts])
    whole = {(it.put.generations, it.put.tags): columns[it.number] or {} for it in puts}
    return replace(
        found,
        puts=tuple(replace(put, columns=whole.get((put.generations, put.tags), {})) for put in found.puts),
    )


@contextmanager
def opened(files: LossyFiles) -> Generator[DiskJournal]:
    """A journal, as `open_journal` makes it."""
    with lossy_sqlite.connect(files.disk) as connection:
        yield DiskJournal(Metadata(connection), files, "memory", SEGMENT_BYTES)


@dataclass
class Counts:
    """How the lives of a history ended."""

    power_losses: int = 0
    kills: int = 0


def run_history(seed: int, disk: LossyDisk) -> Counts:
    """Raises AssertionError if something acknowledged was lost or something cleared came back."""
    rng, reference, counts = random.Random(seed), Reference(), Counts()
    for _ in range(LIVES):
        disk.operations = rng.randint(1, rng.choice([30, 90, 300]))
        with suppress(PowerLossError), opened(LossyFiles(disk)) as journal:
            reference.check(recovered(journal))
            for _ in range(rng.randint(0, 40)):
                _act(journal, reference, rng)
        if rng.random() < 0.25:
            disk, counts.kills = disk.after_kill(), counts.kills + 1
        else:
            disk, counts.power_losses = disk.after_power_loss(rng), counts.power_losses + 1
    with opened(LossyFiles(disk)) as journal:
        reference.check(recovered(journal))
    return counts


def _act(journal: DiskJournal, reference: Reference, rng: random.Random) -> None:
    action = rng.random()
    if action < 0.6:
        records: list[Record] = [
            reference.clear(rng) if rng.random() < 0.25 else reference.put(rng) for _ in range(rng.randint(1, 3))
        ]
        journal.append(records)
    elif action < 0.9:
        journal.sync()
        reference.acknowledge()
    elif journal.compact():
        reference.acknowledge()
