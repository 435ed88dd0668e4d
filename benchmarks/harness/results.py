"""Result files: hardware, commit, versions, command and rows."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "ray", "numpy", "msgspec", "pyzmq")


def hardware() -> dict[str, Any]:
    """CPU model, cores and memory of this machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(encoding="utf-8"))
    return {
        "cpu": model.group(1).strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.group(1)) / 2**20) if memory else None,
        "gpu": None,
    }


def hardware_slug(info: dict[str, Any]) -> str:
    """Folder name for results of this hardware, such as cpu-2x-intel-xeon-2.60ghz-24gib."""
    name = re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\(r\)|\(tm\)|cpu|processor|@", " ", info["cpu"].lower())).strip("-")
    return f"cpu-{info['cores']}x-{name}-{info['memory_gib']}gib"


def commit() -> str:
    """Short commit of the working tree; -dirty where tracked files were changed."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def result_path(name: str) -> Path:
    """`<hardware>/<date>_<commit>/<name>.json` of this machine, day and working tree."""
    day = datetime.datetime.now(datetime.UTC)
    return RESULTS / hardware_slug(hardware()) / f"{day:%Y-%m-%d}_{commit()}" / f"{name}.json"


def write_result(name: str, command: list[str], rows: list[dict[str, Any]]) -> Path:
    """Write a result at its `result_path`, which is returned.

    Raises:
        ValueError: no rows, or a row without numbers: an empty result is an error, never a zero.
    """
    if not rows or not all(any(isinstance(v, int | float) for v in row.values()) for row in rows):
        raise ValueError(f"{name}: there is nothing to write, or a row holds no numbers.")
    path = result_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": name,
        "command": command,
        "commit": commit(),
        "utc": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "load_average": os.getloadavg(),
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def published_results() -> list[Path]:
    """The result files that git tracks, sorted.

    Raises:
        RuntimeError: this is no git checkout, so it is unknown which files were published.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", f"{RESULTS}/*.json"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if listed.returncode:
        raise RuntimeError(f"git does not say which results are published: {listed.stderr.strip()}")
    return sorted(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).exists())


def command_line() -> list[str]:
    """The command line of this benchmark."""
    return ["uv", "run", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]
