"""What the control groups of this process, as of a container or batch job, leave it of its host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNTS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def core_quota() -> int | None:
    """Whole cores that the CPU time of this process is limited to, at least 1; None: no limit."""
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group))]
    return max(1, int(min(quotas))) if quotas else None


def memory_left() -> int | None:
    """Bytes that the memory limits of this process leave; None: no limit.

    File pages that the kernel can drop count as left.
    """
    rooms = [room for group in _groups("memory") if (room := _room(group)) is not None]
    return max(0, min(rooms)) if rooms else None


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control group of this process and of those around it.

    A container may see its own group as the root, whatever its path is on the host.
    """
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # a system without control groups
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = _MOUNTS / controller if names else _MOUNTS
        for name in (path, *map(str, Path(path).parents)):
            yield mount / name.lstrip("/")


def _quota(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period else None


def _room(group: Path) -> int | None:
    limit = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
    used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
    if not (limit.isdecimal() and used):
        return None
    counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    pages = (int(counts.get(f"total_{kind}", counts.get(kind, 0))) for kind in ("inactive_file", "active_file"))
    return int(limit) - int(used) + sum(pages)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
