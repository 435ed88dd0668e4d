"""Every benchmark still runs: each in its tiny mode, as a user would start it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEED_PEER = ["bench_data_plane.py", "bench_transport.py", "bench_metadata.py"]
ALONE = ["bench_learning.py", "parity_verl.py"]
CHECKED_ELSEWHERE = ["bench_same_training.py", "scale_model.py", "compare.py", "report.py", "data_plane.py"]


def runnable() -> set[str]:
    return {path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}


def test_no_benchmark_is_forgotten():
    assert runnable() == {*NEED_PEER, *ALONE, *CHECKED_ELSEWHERE, "bench_controller_bottleneck.py"}


@pytest.mark.slow
@pytest.mark.usefixtures("bench_group")
@pytest.mark.parametrize("name", NEED_PEER)
def test_it_runs_beside_transferqueue(name: str, script: Callable[..., str]):
    tiny = "--smoke" if "--smoke" in (BENCHMARKS / name).read_text() else "--quick"
    assert "must" in script(name, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_it_runs_alone(name: str, script: Callable[..., str]):
    assert script(name, "--smoke").strip()


@pytest.mark.slow
def test_the_controller_bottleneck(script: Callable[..., str]):
    planes = ["driver", "driver-buffers", "simple", "ray"]
    planes += ["transferqueue"] if find_spec("transfer_queue") else []
    printed = script("bench_controller_bottleneck.py", "--smoke", "--planes", ",".join(planes))
    assert [plane for plane in planes if f"'plane': '{plane}'" in printed] == planes


@pytest.mark.slow
def test_the_choice_of_a_backend_works_with_what_is_installed_and_says_what_is_missing(script: Callable[..., str]):
    printed = script("data_plane.py", "--smoke")
    assert "recommended: " in printed
    for name, module in (("transferqueue", "transfer_queue"), ("mooncake", "mooncake")):
        if find_spec(module) is None:
            assert f"missing: {name}" in printed


def test_a_broken_payload_is_named(script: Callable[..., str], tmp_path: Path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("rows: 4\ncolumns: {x: {kind: dense, dtype: float31}}\n")
    script("data_plane.py", "--payload", str(bad), expect=2)
