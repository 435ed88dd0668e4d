"""What a command takes includes its children, orphans and processes that have ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BURN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\ntime.sleep(2)"
COMMAND = f"""
import subprocess, sys
burn = [sys.executable, "-c", {BURN!r}]
orphan = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan, *burn], check=True)  # its child is an orphan now
subprocess.run(burn, check=True)
print('{{"step": 1}}', file=open(sys.argv[1], "a"), flush=True)
sys.exit(int(sys.argv[2]))
"""
MEASURE = """
import dataclasses, json, os, pathlib, sys
from harness.process_tree import run_command
folder = pathlib.Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2], str(folder / "lines.jsonl"), sys.argv[3]]
run = run_command(command, folder / "lines.jsonl", folder / "log", env=os.environ, folder=folder, timeout_s=300)
print(json.dumps(dataclasses.asdict(run)))
"""


def measure(folder: Path, code: int) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since it adopts and waits for all children."""
    command = [sys.executable, "-c", MEASURE, str(folder), COMMAND, str(code)]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=600, check=False)


def test_children_and_orphans_count(tmp_path: Path):
    done = measure(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["cpu"] >= 1.0  # half a second in each of both
    assert run["peak_pss_mib"] > 0
    assert [line["record"] for line in run["lines"]] == [{"step": 1}]
    assert 0 < run["lines"][0]["at"] <= run["seconds"] + 1
    assert run["lines"][0]["cpu"] <= run["cpu"]


@pytest.mark.parametrize("code", [3])
def test_a_command_that_fails_is_named_with_its_code(tmp_path: Path, code: int):
    done = measure(tmp_path, code)
    assert done.returncode != 0
    assert f"ended with {code}" in done.stderr
