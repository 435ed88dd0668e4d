"""Pytest plugin that writes the outcome of each test to the file named by TQ_OUTCOMES."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_outcomes: dict[str, str] = {}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = f"not collected: {_reason(report.longreprtext)}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before = _outcomes.get(report.nodeid, "passed")
    if report.failed and before == "passed":  # a teardown can fail after its test has passed
        _outcomes[report.nodeid] = f"failed: {_reason(report.longreprtext)}"
    elif report.skipped:
        _outcomes[report.nodeid] = f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
    elif report.when == "call" and report.passed:
        _outcomes[report.nodeid] = "passed"


def pytest_sessionfinish() -> None:
    Path(os.environ["TQ_OUTCOMES"]).write_text(json.dumps(_outcomes))


def _reason(text: str) -> str:
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.splitlines() or [""])[0][:200]
