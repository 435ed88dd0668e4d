"""Settings of the timed benchmarks: imports from this folder, one torch thread, and `--publish`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--publish`."""
    parser.addoption(
        "--publish",
        action="store_true",
        help="with --benchmark-json: also write benchmarks/results/<hardware>/<date>_<commit>/timed_*.json",
    )


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Both sides of a comparison use one thread."""
    import torch

    torch.set_num_threads(1)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Publish the medians of each timed module as one result file (`--publish`)."""
    if not config.getoption("--publish"):
        return
    from harness.pairs import publish
    from harness.timed import COMMAND, rows_by_module

    for module, rows in rows_by_module(output_json).items():
        publish(module, rows, COMMAND)
