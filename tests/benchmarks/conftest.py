"""Put benchmarks/ on the path, as `uv run benchmarks/...` does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="session")
def bench_group() -> None:
    """Skip without the packages that only the dependency group `bench` brings."""
    if find_spec("transfer_queue") is None:
        pytest.skip("what the benchmarks compare and time with is not installed: uv sync --group bench")


@pytest.fixture(scope="session")
def script() -> Callable[..., str]:
    """Run a benchmark script; return what it printed, or fail with all of it."""

    def run(name: str, *arguments: str, expect: int = 0, timeout_s: float = 800) -> str:
        command = [sys.executable, str(BENCHMARKS / name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == expect, f"{name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
