"""What the guides write is named by a key and trains; the bad run of a guide shows its alarm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOOP, ESTIMATOR, LOSS = (
    ROOT / "packages" / "rl-trainer" / "examples" / name for name in ("agent_loop.py", "estimator.py", "loss.py")
)
ENGINE = ROOT / "packages" / "rl-ckpt-engine" / "examples" / "weight_engine.py"


@pytest.mark.slow
def test_an_agent_loop_with_an_estimator_and_a_loss(app):
    files = [word for file in (LOOP, ESTIMATOR, LOSS) for word in ("--trust", str(file))]
    keys = [f"rollout.session={LOOP}:SESSION", f"reward.function={LOOP}:score", "rollout.response_length=32"]
    keys += [f"algorithm.adv_estimator={ESTIMATOR}:ESTIMATOR", f"actor.policy_loss.loss_mode={LOSS}:LOSS"]
    done = app(*files, *keys)
    assert done.code == 0, done.err
    for step in done.metrics[1:]:
        assert 1 < step["num_turns/mean"] <= 3
        assert step["num_turns/max"] == 3
        assert step["response_length/max"] > 8
        assert 0 < step["reward/extra/first"] < 1
        assert step["actor/penalty"] >= 0


@pytest.mark.slow
def test_a_weight_engine_and_a_data_plane_backend(
    app, install_plugins, readme_code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    site = install_plugins("rl_transferqueue.backends", directory="someones_backend:Backend")
    (site / "someones_backend.py").write_text(readme_code("docs/guides", 0, "data_plane.md"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    keys = ["checkpoint_engine.backend=file", f"checkpoint_engine.custom_backend_module={ENGINE}:FileEngine"]
    keys += [f"checkpoint_engine.directory={tmp_path}/versions", "placement=separate", "actor.optim.lr=1e-3"]
    keys += ["transfer_queue.backend=directory", f"transfer_queue.backend_address={blocks}"]
    done = app("--trust", str(ENGINE), *keys)
    assert done.code == 0, done.err
    assert [step["weight_sync/version"] for step in done.metrics[1:]] == [1, 2]
    assert max(step["training/rollout_log_probs_diff_max"] for step in done.metrics[1:]) < 1e-4
    assert list(blocks.iterdir()) == []


@pytest.mark.nightly
def test_the_bad_run_of_the_guide_names_its_cause(demo_models: Path, tmp_path: Path):
    """docs/guides/bad_run.md: it forgets, and the first warning names the learning rate."""
    command = [sys.executable, str(ROOT / "apps" / "ppo"), "actor.optim.lr=1e-2", "trainer.run_name=fast"]
    settings = [f"model.cache_dir={demo_models}", "trainer.total_training_steps=6"]
    done = subprocess.run([*command, *settings], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert "moves" in warnings[0]
    assert "lower actor.optim.lr" in warnings[0]
    assert "it fell; see the warnings above" in done.stdout
    assert (tmp_path / "outputs" / "fast" / "report.html").is_file()
