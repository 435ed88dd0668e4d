"""Every benchmark runs in its tiny mode."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.results import published_results

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEER = find_spec("transfer_queue") is not None
NO_MEASUREMENT = {"compare.py", "report.py"}
"""Scripts that work on results; other tests run them."""
BY_NAME = {"bench_controller_bottleneck.py", "choose_backend.py"}
"""Scripts with their own test below."""
OF_THE_APP = {
    "bench_async.py",
    "bench_delta_in_training.py",
    "bench_learning.py",
    "bench_placement.py",
    "bench_trainer.py",
}
"""Scripts that run the app, here with few steps and a cached model."""
LONG = OF_THE_APP - {"bench_trainer.py"} | {"bench_memory.py", "bench_metadata.py", "bench_weight_sync.py"}
"""Scripts that run in the nightly suite."""
LITTLE = (
    "data.val_size=32",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "rollout.num_workers=1",
    "actor.use_kl_loss=false",
)
WITH_VLLM = {"bench_rollout.py"}
"""Scripts that need a separate environment."""


def scripts() -> list[str]:
    return sorted(path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text())


def test_every_script_that_measures_has_a_tiny_mode():
    assert set(scripts()) >= NO_MEASUREMENT | BY_NAME | WITH_VLLM
    for name in set(scripts()) - NO_MEASUREMENT:
        assert '"--smoke"' in (BENCHMARKS / name).read_text(), name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in LONG else pytest.mark.slow)
        for name in sorted(set(scripts()) - NO_MEASUREMENT - BY_NAME - WITH_VLLM)
    ],
)
def test_it_runs(name: str, script: Callable[..., str], request: pytest.FixtureRequest):
    if re.search(r"^from peers.transferqueue", (BENCHMARKS / name).read_text(), re.MULTILINE):
        request.getfixturevalue("bench_group")
    overrides = (f"model.path={request.getfixturevalue('base_model')}", *LITTLE) if name in OF_THE_APP else ()
    assert script(name, "--smoke", *(f"--set={override}" for override in overrides)).strip()


@pytest.mark.nightly
def test_the_data_plane_over_tcp(bench_group: None, script: Callable[..., str]):
    assert "TCP get, every page touched" in script("bench_data_plane.py", "--tcp", "--smoke")


@pytest.mark.slow
def test_generation_is_compared_without_vllm(script: Callable[..., str]):
    assert "tokens/s against transformers' generate" in script("bench_rollout.py", "--engine", "hf", "--smoke")


@pytest.mark.slow
def test_the_timed_benchmarks_run(bench_group: None):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable", str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d\d passed\b", done.stdout)


@pytest.mark.vllm
@pytest.mark.parametrize("name", sorted(WITH_VLLM))
def test_it_runs_with_vllm(name: str, script: Callable[..., str]):
    assert len(script(name, "--smoke").strip().splitlines()) >= 2


@pytest.mark.slow
def test_a_relay_of_weights_is_compared(script: Callable[..., str]):
    printed = script("bench_weight_sync.py", "--relay", "3", "--smoke")
    assert "tcp, 3 receivers: time with a relay over time without" in printed


PLANES = ["driver", "driver-buffers", "simple", "ray", *(["transferqueue"] if PEER else [])]


@pytest.mark.parametrize(
    "planes",
    [
        pytest.param(["driver", "simple"], marks=pytest.mark.slow, id="driver and simple"),
        pytest.param(PLANES, marks=pytest.mark.nightly, id="all"),
    ],
)
def test_the_controller_bottleneck(script: Callable[..., str], planes: list[str]):
    printed = script("bench_controller_bottleneck.py", "--smoke", "--planes", ",".join(planes))
    assert [plane for plane in planes if f"'plane': '{plane}'" in printed] == planes


@pytest.mark.nightly
def test_the_choice_of_a_backend_works_with_what_is_installed_and_says_what_is_missing(script: Callable[..., str]):
    printed = script("choose_backend.py", "--smoke")
    assert "recommended: " in printed
    for name, module in (("transferqueue", "transfer_queue"), ("mooncake", "mooncake")):
        if find_spec(module) is None:
            assert re.search(rf"missing: {name}: .*Install it: uv ", printed)


def test_a_broken_payload_ends_with_a_message(script: Callable[..., str], tmp_path: Path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("rows: 4\ncolumns: {x: {kind: dense, dtype: float31}}\n")
    script("choose_backend.py", "--payload", str(bad), expect=2)


def test_the_scale_model_says_that_it_predicts_and_writes_nothing_in_its_tiny_mode(script: Callable[..., str]):
    newest = [path for path in published_results() if path.name == "controller_bottleneck_sizes.json"][-1]
    command = [sys.executable, "-m", "ppo_step.scale_model", str(newest), "--smoke"]
    printed = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=800, check=True).stdout
    assert printed.startswith("A prediction")
    assert printed.count("published_gain_percent") == 6
