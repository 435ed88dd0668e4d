"""The README's promise: the default run improves a weak base model, and a second run reuses it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from app_runs import MARK, command

ACCURACY = "val-core/sums/acc/mean@1"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The cache folder: the first run stores its base model here for the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        pytest.param("grpo", [], marks=pytest.mark.slow, id="grpo"),
        pytest.param("ppo", [], marks=pytest.mark.nightly, id="ppo"),
        pytest.param("grpo", ["async_rl.max_staleness=1"], marks=pytest.mark.nightly, id="async"),
    ],
)
def test_the_default_run_learns(algorithm, more, tmp_path, cache, mark):
    """Also one step off: with responses that the weights before the last update generated."""

    def run(*overrides: str) -> tuple[str, list[dict[str, float]]]:
        arguments = command(
            f"algorithm={algorithm}", f"model.cache_dir={cache}", f"trainer.output_dir={tmp_path}", *overrides
        )
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=800, check=False, env={**os.environ, MARK: mark}
        )
        assert done.returncode == 0, done.stderr
        name = next(word for word in overrides if "run_name" in word).partition("=")[2]
        return done.stdout, [
            json.loads(line) for line in Path(tmp_path, name, "metrics.jsonl").read_text().splitlines()
        ]

    is_first = not any(cache.iterdir())
    out, metrics = run("trainer.run_name=run", *more)
    assert ("supervised warm-up" in out) == is_first
    assert ("from the cache, no warm-up" in out) == (not is_first)
    accuracies = [m[ACCURACY] for m in metrics if ACCURACY in m]
    assert 0.15 <= accuracies[0] <= 0.45
    assert accuracies[-1] >= 0.90
    ages = [m["training/off_policy/trajectory_staleness/max"] for m in metrics if m["step"] > 1]
    assert set(ages) == {float(bool(more))}
    assert ("rollouts: 1920 prompts finished = 1920 trained + 0 dropped + 0 held" in out) == bool(more)
