"""The programs in the folders examples/ run and print what they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/examples/*.py")}
LIGHT = {
    "packages/rl-trainer/examples/reward.py": [
        "82 {'acc': 1.0, 'score': 1.0, 'short': 1.0}",
        "00082 {'acc': 1.0, 'score': 0.75, 'short': 0.0}",
        "7 {'acc': 0.0, 'score': 0.25, 'short': 1.0}",
        "eighty-two raised ValueError: ",
    ],
    "packages/rl-trainer/examples/tool.py": ["<tool_response>", "2", "91 of 176 tokens are trained on"],
    "packages/rl-trainer/examples/estimator.py": ["[-1.0, -1.0, 0.0, 4.0, 0.0]"],
    "packages/rl-transferqueue/examples/data_plane.py": ["('a', 'b') [[5, 6, 7], [8]]"],
}
"""Example -> beginnings of lines that it prints, in this order. No heavy engine is started."""
HEAVY = {
    "packages/rl-trainer/examples/loss.py": ["[-3.0, -1.759"],  # imports torch
}


def run(example: str, *arguments: str, cwd: Path) -> list[str]:
    command = [sys.executable, str(ROOT / example), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_lines(printed: list[str], wanted: list[str]) -> None:
    lines = iter(printed)
    for start in wanted:
        assert any(line.startswith(start) for line in lines), f"{start!r} is not in {printed}"


@pytest.mark.parametrize("example", sorted(LIGHT))
def test_a_light_example(example: str, tmp_path: Path):
    check_lines(run(example, cwd=tmp_path), LIGHT[example])


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(HEAVY))
def test_an_example_with_torch(example: str, tmp_path: Path):
    check_lines(run(example, cwd=tmp_path), HEAVY[example])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_from_python_and_reading_the_run(demo_models: Path, tmp_path: Path):
    settings = [f"model.cache_dir={demo_models}", "trainer.output_dir=runs", "ray.start_timeout_s=400"]
    trained = run("apps/ppo/examples/train_from_python.py", *settings, cwd=tmp_path)
    assert [line.split()[0] for line in trained[-3:-1]] == ["1", "2"]
    assert trained[-1] == str(tmp_path / "runs" / "own" / "checkpoint")
    read = run("apps/ppo/examples/read_a_run.py", "runs/own", cwd=tmp_path)
    check_lines(read, ["step 0", "step 1 score 0.", "step 2 score 0.", "ended: finished"])


def test_every_example_has_a_test():
    tested = {*LIGHT, *HEAVY, "apps/ppo/examples/train_from_python.py", "apps/ppo/examples/read_a_run.py"}
    assert tested == EXAMPLES
    text = (ROOT / "README.md").read_text() + "".join(path.read_text() for path in ROOT.glob("*/*/README.md"))
    text += "".join(path.read_text() for path in ROOT.glob("docs/**/*.md"))
    assert [name for name in EXAMPLES if Path(name).name not in text] == []
