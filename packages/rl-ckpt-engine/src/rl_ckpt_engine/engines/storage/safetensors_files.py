"""Write one version of the weights as a folder of safetensors files, in one pass over the tensors.

    v<version, 12 digits>-<random>/
        model-00001.safetensors ...   standard safetensors; each header is padded to 64 KiB with
        blanks model.safetensors.index.json  which tensor is in which file, as in Hugging Face
        checkpoints manifest                      see rl_ckpt_engine.payload.manifest

* A folder MUST get its name only when it is complete and on disk; until then it is named
  .<name>.tmp.
* A reader MUST NOT map the files: a truncated file would kill it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO

import msgspec

from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.disk_writes import fsync

SHARD_BYTES = 1 << 30
"""A file that has reached this size gets no further tensor."""
MANIFEST = "manifest"
_DATA_START = 64 << 10
_HEADER_BYTES = _DATA_START - 8
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class FolderPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Location of the tensors of a manifest."""

    folder: str
    """Name of the folder within the shared directory."""
    files: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    """For each tensor, the number of its file and the first byte within it."""


class _Shard:
    """One file being written."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._file.seek(_DATA_START)
        self._items: list[str] = ['"__metadata__":{"format":"pt"}']
        self._header_size = len(self._items[0]) + 2
        self.size = 0

    def add(self, weight: WeightTensor) -> bool:
        """Add the next tensor to the header; False if the header is full."""
        facts = {
            "dtype": _DTYPES[weight.dtype],
            "shape": weight.shape,
            "data_offsets": [self.size, self.size + weight.nbytes],
        }
        item = f"{json.dumps(weight.name)}:{json.dumps(facts)}"
        if self._header_size + 1 + len(item) > _HEADER_BYTES:
            return False
        self._items.append(item)
        self._header_size += 1 + len(item)
        return True

    def write(self, piece: memoryview) -> None:
        self._file.write(piece)
        self.size += piece.nbytes

    def finish(self) -> None:
        """Write the header and flush the file to disk."""
        self._file.seek(0)
        self._file.write(_HEADER_BYTES.to_bytes(8, "little"))
        self._file.write(f"{{{','.join(self._items)}}}".encode().ljust(_HEADER_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close a file that is not finished."""
        with contextlib.suppress(OSError):  # on a full disk it can't write what is buffered
            self._file.close()


class Folder:
    """The folder of one version. All methods may raise OSError.

    Args:
        directory: parent directory of the folder.
    """

    unordered = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = ""
        self._shards: list[_Shard] = []
        self._places: list[tuple[int, int]] = []
        self._index: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Name of the folder once it is complete."""
        return self._name

    @property
    def _hidden(self) -> Path:
        return self._directory / f".{self._name}.tmp"

    @property
    def placement(self) -> bytes:
        """Msgpack of FolderPlacement."""
        files = tuple(_file_name(number) for number in range(len(self._shards)))
        return msgspec.msgpack.encode(FolderPlacement(folder=self._name, files=files, places=tuple(self._places)))

    def begin(self, version: int) -> None:
        """Create a hidden folder."""
        self.withdraw()
        self._name = f"v{version:012d}-{secrets.token_hex(4)}"
        self._hidden.mkdir(parents=True)

    def start(self, weight: WeightTensor, offset: int) -> bool:
        """Add a tensor to the current file, or to a new one."""
        del offset
        full = not self._shards or self._shards[-1].size >= SHARD_BYTES
        if full or not self._shards[-1].add(weight):
            self._shards.append(_Shard(self._hidden / _file_name(len(self._shards))))
            if not self._shards[-1].add(weight):
                raise WeightSyncError(
                    f"The name of tensor {weight.name[:80]!r}... is too long for the header of a file."
                )
        self._places.append((len(self._shards) - 1, _DATA_START + self._shards[-1].size))
        self._index[weight.name] = _file_name(len(self._shards) - 1)
        return True

    def write(self, offset: int, piece: memoryview) -> None:
        """Append bytes to the current file."""
        del offset
        self._shards[-1].write(piece)

    def complete(self, manifest: Manifest) -> None:
        """Flush everything to disk, then give the folder its name."""
        for shard in self._shards:
            shard.finish()
        total = {"total_size": manifest.tensor_nbytes}
        index = json.dumps({"metadata": total, "weight_map": self._index})
        write_durably(self._hidden / "model.safetensors.index.json", index.encode())
        write_durably(self._hidden / MANIFEST, manifest.encode())
        self._hidden.rename(self._directory / self._name)
        fsync(self._directory)

    def withdraw(self) -> None:
        """Remove the folder, hidden or not."""
        for shard in self._shards:
            shard.close()
        self._shards, self._places, self._index = [], [], {}
        if self._name:
            for folder in (self._hidden, self._directory / self._name):
                shutil.rmtree(folder, ignore_errors=True)
            self._name = ""

    def close(self) -> None:
        """Close open files; a complete folder stays."""
        for shard in self._shards:
            shard.close()


def write_durably(path: Path, data: bytes) -> None:
    """Write a file atomically and durably: to a temporary file, flushed to disk, then renamed."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _file_name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"
