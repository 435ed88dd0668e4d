"""A disk in memory that loses what was not synced: a loss of power for tests.

Until a file is synced, each of its sectors may hold any of its contents since the last sync, its
size may be any since then, and until its folder is synced its name may be there or not. All of
these are chosen independently of each other, so writes are torn and reordered.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field, replace

SECTOR = 512
SYNCS = ("payload", "segment names", "commit", "log name", "opening")
"""Those that a journal needs: of segments and their names, of each commit of SQLite and the name of
its log, and of what a killed process has committed but not synced."""


class PowerLossError(Exception):
    """The power is gone in the middle of an operation."""


@dataclass
class Inode:
    """A file: its bytes, and what a loss of power may leave of them."""

    now: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=lambda: [0])
    older: dict[int, list[bytes]] = field(default_factory=dict)
    """Sector -> its contents since the last sync, without the newest."""

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self._remember(offset, end)
        if end > len(self.now):
            self.resize(end)
        self.now[offset:end] = data

    def resize(self, nbytes: int) -> None:
        self._remember(nbytes, len(self.now))
        del self.now[nbytes:]
        self.now.extend(bytes(nbytes - len(self.now)))
        self.sizes.append(nbytes)

    def sync(self) -> None:
        self.sizes, self.older = [len(self.now)], {}

    def after_power_loss(self, rng: random.Random) -> Inode:
        size = rng.choice(self.sizes)
        found = self.now[:size] + bytes(max(0, size - len(self.now)))
        for sector, contents in sorted(self.older.items()):
            at = sector * SECTOR
            chosen = rng.choice([*contents, bytes(self.now[at : at + SECTOR])])
            found[at : at + SECTOR] = chosen.ljust(SECTOR, b"\0")[: max(0, size - at)]
        return Inode(found, [size])

    def _remember(self, start: int, stop: int) -> None:
        for sector in range(start // SECTOR, -(-stop // SECTOR)):
            at = sector * SECTOR
            self.older.setdefault(sector, []).append(bytes(self.now[at : at + SECTOR]))


@dataclass
class Folder:
    """Names of files, and those that a loss of power leaves for sure."""

    names: dict[str, Inode] = field(default_factory=dict)
    durable: dict[str, Inode] = field(default_factory=dict)

    def find(self, name: str) -> Inode:
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return self.names[name]

    def sync(self) -> None:
        self.durable = dict(self.names)

    def after_power_loss(self, rng: random.Random) -> Folder:
        found: dict[str, Inode] = {}
        for name in sorted({**self.names, **self.durable}):
            new, old = self.names.get(name), self.durable.get(name)
            inode = new if new is old else rng.choice([new, old])
            if inode is not None:
                found[name] = inode.after_power_loss(rng)
        return Folder(found, dict(found))


@dataclass
class LossyDisk:
    """The folders of a journal.

    Attributes:
        operations: the power goes before the operation of this number, counted from 0.
        without: the sync that does nothing, one of `SYNCS`: a mutant that a test must catch.
    """

    without: str = ""
    operations: int = 1 << 60
    payload: Folder = field(default_factory=Folder)
    metadata: Folder = field(default_factory=Folder)

    def powered(self) -> bool:
        """Begin an operation that changes the disk, if there still is power."""
        self.operations -= 1
        return self.operations >= 0

    def step(self) -> None:
        """Begin an operation; raises PowerLossError."""
        if not self.powered():
            raise PowerLossError

    def after_kill(self) -> LossyDisk:
        """The disk for the next process, where the power stayed on: nothing is lost yet."""
        return replace(self, operations=1 << 60)

    def after_power_loss(self, rng: random.Random) -> LossyDisk:
        """What the disk holds then."""
        return LossyDisk(self.without, 1 << 60, self.payload.after_power_loss(rng), self.metadata.after_power_loss(rng))
