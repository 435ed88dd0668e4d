"""The committed record of the nightly tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nightly_record import RECORD, NightlyRecord

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_record_has_only_tests_of_the_nightly_suite():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "nightly", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    collected = {line for line in done.stdout.splitlines() if "::" in line}
    assert sorted(json.loads(RECORD.read_text()).keys() - collected) == []


def test_no_nightly_test_is_recorded_as_failed():
    recorded = json.loads(RECORD.read_text())
    assert [test for test, run in recorded.items() if run["outcome"] == "failed"] == []
    assert [test for test, run in recorded.items() if run["outcome"] == "skipped" and not run.get("reason")] == []


def test_a_run_replaces_the_entries_of_its_tests_and_keeps_the_others(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"a": {"outcome": "passed"}, "b": {"outcome": "passed"}}))
    record = NightlyRecord(path)
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        record.pytest_runtest_logreport(report("b", when, outcome, {"nightly": 1}))
    record.pytest_runtest_logreport(report("c", "setup", "skipped", {"nightly": 1}))
    record.pytest_runtest_logreport(report("d", "call", "passed", {"slow": 1}))
    record.pytest_sessionfinish()
    written = json.loads(path.read_text())
    assert list(written) == ["a", "b", "c"]
    assert written["a"] == {"outcome": "passed"}
    assert (written["b"]["outcome"], written["b"]["seconds"]) == ("failed", 1.5)
    assert (written["c"]["outcome"], written["c"]["reason"]) == ("skipped", "why")
    assert written["b"].keys() == {"outcome", "seconds", "date", "commit", "processor"}


def report(test, when, outcome, keywords):
    why = ("file.py", 1, "why") if outcome == "skipped" else None
    return pytest.TestReport(test, (test, 1, test), keywords, outcome, why, when, duration=0.5)
