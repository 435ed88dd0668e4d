"""The last run of every nightly test, kept in `tests/nightly_last_run.json`.

The file is written at the end of each run of nightly tests, also of some of them. Tests that did
not run keep their entry.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).parents[1] / "nightly_last_run.json"


class NightlyRecord:
    """Plug-in of pytest that collects the results of nightly tests.

    Attributes:
        results: node of the test -> its outcome and the seconds of its phases.
    """

    def __init__(self, path: Path = RECORD) -> None:
        self._path = path
        self._place = _place()  # some tests write their own records: now nothing has changed yet
        self.results: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "nightly" not in report.keywords:
            return
        result = self.results.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        result["seconds"] = round(result["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            result["outcome"] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            result["reason"] = report.longrepr[2]

    def pytest_sessionfinish(self) -> None:
        if not self.results:
            return
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        known |= {test: {**result, **self._place} for test, result in self.results.items()}
        self._path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def _place() -> dict[str, str]:
    """Date, commit and processor of this run, as in the results of the benchmarks."""
    sys.path.append(str(RECORD.parents[1] / "benchmarks"))
    from harness.results import commit, hardware

    return {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "processor": hardware()["cpu"]}
