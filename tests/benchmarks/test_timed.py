"""Rows from the JSON of pytest-benchmark."""

from __future__ import annotations

from harness.timed import rows_by_module


def timed(name: str, median: float) -> dict[str, object]:
    return {
        "fullname": name,
        "extra_info": {"operation": "copy", "subject": "memcpy"},
        "stats": {"median": median, "iqr": 0.001, "rounds": 5},
    }


def test_rows_are_grouped_by_module_and_in_milliseconds():
    report = {
        "benchmarks": [
            timed("benchmarks/timed/test_a.py::test_x[1]", 0.25),
            timed("benchmarks/timed/test_b.py::test_x", 2),
        ]
    }
    row = {"operation": "copy", "subject": "memcpy", "iqr_ms": 1.0, "rounds": 5}
    assert rows_by_module(report) == {
        "timed_a": [{**row, "median_ms": 250.0}],
        "timed_b": [{**row, "median_ms": 2000.0}],
    }
