"""Format the state of a plane for `rl-tq status`, as text or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import asdict

from rl_protocol.counted import counted
from rl_protocol.ports import PlaneStats
from rl_transferqueue.wire.messages import Metrics, OperationCount

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of a plane at one moment."""

    controller_pid: int
    storage_units: int
    stats: PlaneStats
    metrics: Metrics

    def to_json(self) -> str:
        """One line of JSON, every number under its name."""
        metrics = asdict(self.metrics)
        for name in ("operations", "columns"):
            metrics[name] = {key: asdict(count) for key, count in metrics[name].items()}
        plane = {"controller_pid": self.controller_pid, "storage_units": self.storage_units}
        return msgspec.json.encode({**plane, **asdict(self.stats), **metrics}).decode()


def size(nbytes: float) -> str:
    """Bytes in a readable unit.

    >>> size(1536), size(3), size(1 << 40)
    ('1.5 KiB', '3 B', '1.0 TiB')
    """
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes /= 1024
        power += 1
    return f"{nbytes:.1f} {_UNITS[power]}" if power else f"{int(nbytes)} B"


def describe(now: Status, before: Status | None = None, seconds: float = 0.0) -> str:
    """The state as lines of text, with requests per second since `before`, `seconds` earlier."""
    stats, metrics = now.stats, now.metrics
    share = f" ({stats.bytes_used / stats.bytes_capacity:.1%})" if stats.bytes_capacity else ""
    lines = [
        f"plane     controller pid {now.controller_pid}, {counted(now.storage_units, 'storage unit')}",
        f"memory    {size(stats.bytes_used)} of {size(stats.bytes_capacity)}{share}",
        f"clients   {metrics.sessions} connected",
        f"waiting   {metrics.waiting - metrics.waiting_puts} for rows, {metrics.waiting_puts} for memory "
        f"({size(metrics.waiting_bytes)})",
        f"moved     {', '.join(f'{link} {size(nbytes)}' for link, nbytes in stats.links.items())}",
        f"errors    {', '.join(f'{name} {count}' for name, count in sorted(metrics.errors.items())) or 'none'}",
        "",
        *table(["partition", "rows"], ([name, f"{rows:,}"] for name, rows in sorted(stats.rows.items()))),
        "",
        *table(
            ["operation", "requests", "per s", "mean us", "longest ms", "received"],
            (
                [name, *_operation(count, before.metrics.operations.get(name) if before else None, seconds)]
                for name, count in sorted(metrics.operations.items(), key=lambda item: -item[1].requests)
            ),
        ),
        "",
        *table(
            ["column", "rows put", "bytes put", "rows read"],
            (
                [name, f"{count.rows_written:,}", size(count.bytes_written), f"{count.rows_located:,}"]
                for name, count in sorted(metrics.columns.items(), key=lambda item: -item[1].bytes_written)
            ),
        ),
    ]
    return "\n".join(lines)


def _operation(count: OperationCount, before: OperationCount | None, seconds: float) -> list[str]:
    rate = f"{(count.requests - (before.requests if before else 0)) / seconds:,.0f}" if seconds else "-"
    mean = count.nanoseconds / max(count.requests, 1) / 1e3
    return [
        f"{count.requests:,}",
        rate,
        f"{mean:.0f}",
        f"{count.longest_nanoseconds / 1e6:.1f}",
        size(count.bytes_received),
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as aligned text, the first column on the left; "(none)" if there are no rows.

    >>> table(["name", "n"], [["a", "10"], ["long one", "7"]])
    ['name       n', 'a         10', 'long one   7']
    """
    cells = [list(head), *map(list, rows)]
    if len(cells) == 1:
        cells.append(["(none)", *[""] * (len(head) - 1)])
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in cells
    ]
