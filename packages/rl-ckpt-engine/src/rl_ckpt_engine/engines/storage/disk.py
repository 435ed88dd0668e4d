"""Engine `disk`: each version is a folder of safetensors files in a shared directory.

Versions outlive the sender and can be read by late joiners, with or without a manager: `latest`
reads the manifest of the version committed last. The directory belongs to one sender at a time; the
first commit removes the versions of earlier senders.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.engines.storage.safetensors_files import MANIFEST, Folder, FolderPlacement, write_durably
from rl_ckpt_engine.payload.block_stream import Deadline, Pacer
from rl_ckpt_engine.payload.digests import blocks
from rl_ckpt_engine.payload.manifest import Manifest, TensorEntry, decode_struct
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.support.disk_writes import fsync

LATEST = "LATEST"
"""File with the name of the folder of the version committed last."""
_MOST_BYTES = 1 << 62
"""No file is larger."""
_FOLDERS = "*v" + "[0-9]" * 12 + "-*"


class DiskMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    directory: str


_member_decoder = msgspec.msgpack.Decoder(DiskMember)
_placement_decoder = msgspec.msgpack.Decoder(FolderPlacement)


class DiskEngine(PublishingEngine[Folder]):
    """Stores versions in a directory, at most two at a time; after `close`, only the one committed
    last.

    Raises:
        ConfigError: `directory` is not set.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "disk"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False,
        zero_copy=False,
        elastic=True,
        devices=("cpu",),
        durable=True,
        caches=True,
        shares=True,
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        if not self._config.directory:
            raise ConfigError(
                "Engine 'disk' needs a directory shared by the sender and all receivers; set CheckpointEngineConfig.directory."
            )
        self._directory = Path(self._config.directory).absolute()

    def prepare(self) -> bytes:
        return msgspec.msgpack.encode(DiskMember(directory=str(self._directory)))

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        for member in (sender, *receivers):
            decode_struct(_member_decoder, member, "metadata of an engine 'disk'")

    def _new_store(self) -> Folder:
        return Folder(self._directory)

    async def republish(self, *, timeout_s: float) -> Manifest:
        """Return the manifest of the version received last; the files serve late joiners without a
        copy."""
        del timeout_s
        return self.get_weights()[0]

    def finalize(self, version: int) -> None:
        """Commit the version: from now on `latest` returns it."""
        former = self._sending.versions.finalize(version)
        committed = self._sending.versions.committed
        assert committed is not None, "finalize commits"
        try:
            write_durably(self._directory / LATEST, committed.held.name.encode())
            fsync(self._directory)
        except OSError as error:
            raise WeightSyncError(f"Version {version} could not be committed in {self._directory}: {error}.") from error
        self._sending.recycle(former)
        for folder in self._directory.glob(_FOLDERS):
            if folder.name != committed.held.name:
                shutil.rmtree(folder, ignore_errors=True)

    async def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        directory = Path(decode_struct(_member_decoder, manifest.sender, "metadata of an engine 'disk'").directory)
        placement = decode_struct(_placement_decoder, manifest.placement, "placement of an engine 'disk'")
        with _Files(directory, placement, manifest) as files:
            pacer = Pacer(deadline)
            for bucket in buckets:
                for start, piece in blocks(bucket.memory):
                    files.read(bucket.start + start, piece)
                    await pacer.advance(piece.nbytes)
                yield


def latest(directory: str | Path) -> Manifest | None:
    """The manifest of the version committed last in that directory; None before the first.

    Raises:
        WeightSyncError: the files are damaged or can't be read.
    """
    try:
        folder = (Path(directory) / LATEST).read_text()
        return Manifest.decode((Path(directory) / Path(folder).name / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise WeightSyncError(f"The version committed last in {directory} can't be read: {error}.") from error


class _Files:
    """The open files of a version, for one receive."""

    def __init__(self, directory: Path, placement: FolderPlacement, manifest: Manifest) -> None:
        self._version = manifest.version
        self._entries: Sequence[TensorEntry] = manifest.tensors
        self._places = placement.places
        fits = all(0 <= n < len(placement.files) and 0 <= at < _MOST_BYTES for n, at in self._places)
        if len(self._places) != len(self._entries) or not fits:
            raise WeightSyncError(f"The placement of version {manifest.version} does not fit its tensors.")
        folder = directory / Path(placement.folder).name
        self._paths = [folder / Path(name).name for name in placement.files]
        self._fds: list[int] = []
        self._next = 0

    def __enter__(self) -> _Files:
        try:
            for path in self._paths:
                self._fds.append(
                    os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                )  # opening a pipe would block
                if not stat.S_ISREG(os.fstat(self._fds[-1]).st_mode):
                    raise OSError(f"{path} is not a regular file")
        except OSError as error:
            self.__exit__()
            raise WeightSyncError(
                f"Version {self._version} is no longer available ({error}): the sender withdrew it or has a later one. A new sync is needed."
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the payload from `start` on, except for padding. Calls must come in
        order.

        Raises:
            WeightSyncError: a file is too short or can't be read.
        """
        stop = start + into.nbytes
        while self._next < len(self._entries) and (entry := self._entries[self._next]).offset < stop:
            low, high = max(entry.offset, start), min(entry.end, stop)
            if low < high:
                number, place = self._places[self._next]
                self._fill(number, place + low - entry.offset, into[low - start : high - start])
            if entry.end > stop:
                return
            self._next += 1

    def _fill(self, number: int, at: int, into: memoryview) -> None:
        try:
            while into:
                got = os.preadv(self._fds[number], [into], at)
                if not got:
                    raise WeightSyncError(f"{self._paths[number]} is truncated; version {self._version} can't be read.")
                into, at = into[got:], at + got
        except OSError as error:
            raise WeightSyncError(f"{self._paths[number]} can't be read: {error}.") from error
