"""A journal whose power goes or whose process dies at random, checked against a reference."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import lossy_sqlite
from lossy_disk import LossyDisk, PowerLossError
from lossy_files import LossyFiles

from rl_transferqueue.journal.disk_journal import DiskJournal
from rl_transferqueue.journal.metadata import Metadata
from rl_transferqueue.journal.records import ClearRecord, Journal, PutRecord, Record, Recovered

SEGMENT_BYTES = 4096
LIVES = 4


class Reference:
    """What was appended, and how much of it must have survived."""

    def __init__(self) -> None:
        self.puts: dict[bytes, PutRecord] = {}
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
        tag = rng.randbytes(8)
        columns = {f"column {i}": rng.randbytes(rng.choice([0, 1, 63, 600, 1500])) for i in range(rng.randint(0, 3))}
        if rng.random() < 0.05:
            columns["large"] = rng.randbytes(2 * SEGMENT_BYTES)
        record = PutRecord(
            partition="train", keys=tuple(map(str, generations)), generations=generations, tags=tag, columns=columns
        )
        self.puts[tag] = record
        return record

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
        for tag, put in self.puts.items():
            if tag in self.acknowledged and not self.cleared.issuperset(put.generations):
                assert tag in tags
            if self.cleared_for_sure.issuperset(put.generations):
                assert tag not in tags
        held = {it for put in found.puts for it in put.generations}
        assert self.cleared_for_sure & held <= found.cleared <= self.cleared
        assert found.report.rows_kept == len(held - found.cleared)
        gone = {it for tag, put in self.puts.items() if tag not in tags for it in put.generations} - held
        self.puts = {tag: self.puts[tag] for tag in tags}
        self.cleared = set(found.cleared) | gone
        self.acknowledge()


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
    else:
        journal.compact()
        reference.acknowledge()
