"""The payload files of choose_backend.py, install hints and the choice. Pure.

A payload file (YAML):

    rows: 64                    rows of one put
    reads: 3                    how often each row is read after its put (default 3)
    columns:
      NAME: {kind: dense,  dtype: float32, dims: [16]}
      NAME: {kind: ragged, dtype: bfloat16, dims: [1536], length: [128, 512]}  128 to 512 elements
      NAME: {kind: object, length: [8, 64]}                                    8 to 64 characters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_protocol import BatchData, DenseColumn, ObjectColumn, RaggedColumn
from rl_protocol.batch.columns import Column, Kind, offsets_from_lengths
from rl_protocol.batch.dtypes import storage_dtype

BACKENDS = ("simple", "ray", "mooncake", "transferqueue")
INSTALL = {
    "ray": "uv pip install 'rl-transferqueue[ray]'",
    "mooncake": "uv pip install 'rl-transferqueue[mooncake]'; Debian: apt-get install libibverbs1",
    "transferqueue": "uv sync --group bench",
}
COPIES = {"simple": (1, 0), "ray": (2, 0), "mooncake": (2, 1), "transferqueue": (3, 3)}
"""Copies of every byte per put and per get on one host, from the code, not measured.

`simple` gets rows that lie side by side without a copy, others with one. TransferQueue puts with
two copies to a single unit.
"""
NEAR = 1.15
"""Backends within this factor in seconds count as equally fast; less CPU decides."""


class ColumnSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One column of a payload file."""

    kind: Kind
    dtype: str = "float32"
    dims: tuple[int, ...] = ()
    length: tuple[int, int] = (1, 1)


class PayloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A payload file."""

    rows: int
    columns: dict[str, ColumnSpec]
    reads: int = 3


def read_payload(path: Path) -> PayloadSpec:
    """A payload file, checked.

    Raises:
        ValueError: says what is wrong with it.
    """
    try:
        spec = msgspec.yaml.decode(path.read_bytes(), type=PayloadSpec)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error
    if spec.rows < 1 or spec.reads < 1 or not spec.columns:
        raise ValueError(
            f"{path}: needs rows >= 1, reads >= 1 and columns; got {spec.rows}, {spec.reads}, {len(spec.columns)}"
        )
    for name, column in spec.columns.items():
        low, high = column.length
        if not 0 <= low <= high:
            raise ValueError(f"{path}: length of {name!r} must be [least, most]; got [{low}, {high}]")
        if column.kind != "object":
            storage_dtype(column.dtype)
    return spec


def make_batch(spec: PayloadSpec, seed: int = 7) -> BatchData:
    """Rows as the payload describes them."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Column] = {}
    for name, column in spec.columns.items():
        lengths = rng.integers(column.length[0], column.length[1] + 1, spec.rows)
        if column.kind == "object":
            columns[name] = ObjectColumn.from_values(["x" * n for n in lengths.tolist()])
            continue
        rows = spec.rows if column.kind == "dense" else int(lengths.sum())
        store = storage_dtype(column.dtype)
        raw = rng.integers(0, 2, (rows, *column.dims), np.uint8).astype(store)
        columns[name] = (
            DenseColumn(raw, column.dtype)
            if column.kind == "dense"
            else RaggedColumn(raw, offsets_from_lengths(lengths), column.dtype)
        )
    return BatchData(columns)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of one put and one get of the payload in seconds and CPU seconds, and memory."""

    backend: str
    put_s: float
    get_s: float
    put_p99_s: float
    get_p99_s: float
    put_cpu_s: float
    get_cpu_s: float
    memory_bytes: int
    """Rise of the resident memory of the backend's processes while they hold the payload once."""

    def seconds(self, reads: int) -> float:
        """One put and its reads."""
        return self.put_s + reads * self.get_s

    def cpu_seconds(self, reads: int) -> float:
        """The same in CPU seconds of all processes."""
        return self.put_cpu_s + reads * self.get_cpu_s

    def row(self, payload: str, nbytes: int, reads: int) -> dict[str, Any]:
        """The row of the result."""
        gib, (put, get) = nbytes / 2**30, COPIES[self.backend]
        figures = {
            "put_gib_s": gib / self.put_s,
            "get_gib_s": gib / self.get_s,
            "put_p99_ms": self.put_p99_s * 1e3,
            "get_p99_ms": self.get_p99_s * 1e3,
            "cpu_s_per_gib": self.cpu_seconds(reads) / (gib * (1 + reads)),
            "memory_per_byte": self.memory_bytes / nbytes,
        }
        short = {name: float(f"{value:.4g}") for name, value in figures.items()}
        return {
            "backend": self.backend,
            "payload": payload,
            "payload_mib": round(nbytes / 2**20, 2),
            **short,
            "copies": f"{put}+{get}",
        }


def recommend(found: Sequence[Measured], reads: int) -> tuple[str, list[str]]:
    """The backend to take for this payload on one host, and why.

    The fastest for one put and its reads; among those within NEAR of it, the one that takes the
    least CPU.

    Raises:
        ValueError: nothing was measured.
    """
    if not found:
        raise ValueError("No backend could be measured; install one of those that are missing.")
    by_time = sorted(found, key=lambda one: one.seconds(reads))
    fastest = by_time[0].seconds(reads)
    near = [one for one in by_time if one.seconds(reads) <= NEAR * fastest]
    best = min(near, key=lambda one: one.cpu_seconds(reads))
    if len(near) > 1:
        names = ", ".join(one.backend for one in near)
        reasons = [f"{names} take about the same time; {best.backend} takes the least CPU of them"]
    else:
        reasons = [f"one put and {reads} reads of every row take {fastest * 1e3:.3g} ms"]
    for other in by_time:
        if other not in near:
            slower, cpu = other.seconds(reads) / best.seconds(reads), other.cpu_seconds(reads) / best.cpu_seconds(reads)
            reasons.append(f"{slower:.3g} times faster than {other.backend}, with {cpu:.3g} times less CPU")
    leanest = min(found, key=lambda one: one.memory_bytes)
    if leanest.memory_bytes * 1.2 < best.memory_bytes:
        reasons.append(
            f"but {leanest.backend} needs less memory: {leanest.memory_bytes / 2**20:.0f} MiB against {best.memory_bytes / 2**20:.0f}"
        )
    reasons.append(
        "measured on one host; to clients on others simple moves bytes over TCP, ray through its object stores, mooncake by RDMA if there is any"
    )
    return best.backend, reasons


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a terminal."""
    names = (
        "backend",
        "put_gib_s",
        "get_gib_s",
        "put_p99_ms",
        "get_p99_ms",
        "cpu_s_per_gib",
        "copies",
        "memory_per_byte",
    )
    heads = (
        "backend",
        "put GiB/s",
        "get GiB/s",
        "put p99 ms",
        "get p99 ms",
        "CPU-s/GiB",
        "copies put+get",
        "memory per byte",
    )
    lines = [heads, *([f"{row[name]}" for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
