"""The programs in the folders examples/ run and print what they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from two_nodes import two_nodes

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
    "packages/rl-trainer/examples/mcp_tool.py": [
        "described to the model: The number of words of a text.",
        "<tool_response>",
        "2",
    ],
    "packages/rl-trainer/examples/agent_loop.py": [
        "7237+45=82 {'score': 1.0, 'first': 0.0, 'pred': '82'}",
        "6 of 12 tokens are trained on",
    ],
    "packages/rl-trainer/examples/estimator.py": ["[-1.0, -1.0, 0.0, 4.0, 0.0]"],
    "packages/rl-ckpt-engine/examples/weight_engine.py": ["version 1 [1.0, 1.0, 1.0, 1.0] on ('rollout-0',)"],
    "packages/rl-ckpt-engine/examples/weight_sync.py": [
        "rollout: version 1 [1.0, 1.0, 1.0, 1.0]",
        "trainer: version 1 is active on ('rollout-0',)",
        "rollout: version 2 [2.0, 2.0, 2.0, 2.0]",
        "trainer: version 2 is active on ('rollout-0',)",
    ],
    "packages/rl-transferqueue/examples/data_plane.py": ["('a', 'b') [[5, 6, 7], [8]]"],
}
"""Example -> beginnings of lines that it prints, in this order. No heavy engine is started."""
HEAVY = {
    "packages/rl-trainer/examples/loss.py": ["[-3.0, -1.759"],  # imports torch
    "packages/rl-megatron-peft/examples/lora_to_peft.py": ["base: ", "Megatron: ", "peft: "],  # compares the last two
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


@pytest.fixture
def settings(demo_models: Path) -> list[str]:
    return [f"model.cache_dir={demo_models}", "trainer.output_dir=runs", "ray.start_timeout_s=400"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_from_python_and_reading_the_run(settings: list[str], tmp_path: Path):
    trained = run("apps/ppo/examples/train_from_python.py", *settings, cwd=tmp_path)
    assert [line.split()[0] for line in trained[-3:-1]] == ["1", "2"]
    assert trained[-1] == str(tmp_path / "runs" / "own" / "checkpoint")
    read = run("apps/ppo/examples/read_a_run.py", "runs/own", cwd=tmp_path)
    check_lines(read, ["step 0", "step 1 score 0.", "step 2 score 0.", "ended: finished"])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_an_asynchronous_run(settings: list[str], tmp_path: Path):
    lines = run("apps/ppo/examples/async_run.py", *settings, cwd=tmp_path)
    assert [line.split(": ")[0] for line in lines] == ["step 1", "step 2", "step 3", "step 4"]
    assert lines[0].startswith("step 1: 0 versions old, ")
    assert {line.split()[2] for line in lines} <= {"0", "1"}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_run_on_a_ray_cluster(settings: list[str], tmp_path: Path):
    with two_nodes(num_cpus=2) as address:
        printed = run("apps/ppo/examples/ray_cluster.py", address, *settings, cwd=tmp_path)
    check_lines(printed, ["step 0", "step 1", "step 2", str(tmp_path / "runs" / "cluster" / "checkpoint")])


def test_every_example_has_a_test_and_is_linked():
    text = Path(__file__).read_text()
    assert [name for name in EXAMPLES if name not in text] == []
    assert {*LIGHT, *HEAVY} <= EXAMPLES
    links = {path: path.read_text() for pattern in ("*/*/README.md", "docs/**/*.md") for path in ROOT.glob(pattern)}
    for name in EXAMPLES:
        linked = {path.is_relative_to(ROOT / "docs") for path, page in links.items() if Path(name).name in page}
        assert linked == {True, False}, f"{name} must be linked from its README and from a page in docs/"
