"""Result rows from the JSON that pytest-benchmark writes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

COMMAND = ["uv", "run", "--group", "bench", "pytest", "benchmarks", "--benchmark-json=FILE", "--publish"]


def rows_by_module(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each timed module, by the name of its result file (`timed_batch_operations`)."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for timed in report["benchmarks"]:
        module = PurePosixPath(timed["fullname"].partition("::")[0]).stem
        rows.setdefault(module.replace("test_", "timed_", 1), []).append(
            {
                **timed["extra_info"],
                "median_ms": timed["stats"]["median"] * 1e3,
                "iqr_ms": timed["stats"]["iqr"] * 1e3,
                "rounds": timed["stats"]["rounds"],
            }
        )
    return rows
