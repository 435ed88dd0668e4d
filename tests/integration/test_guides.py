"""What the guides write is named by a key and trains."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
LOOP = PACKAGES / "rl-trainer" / "examples" / "agent_loop.py"
ESTIMATOR = PACKAGES / "rl-trainer" / "examples" / "estimator.py"
LOSS = PACKAGES / "rl-trainer" / "examples" / "loss.py"
ENGINE = PACKAGES / "rl-ckpt-engine" / "examples" / "weight_engine.py"


def test_an_agent_loop(app):
    keys = [f"rollout.session={LOOP}:SESSION", f"reward.function={LOOP}:score", "rollout.response_length=32"]
    done = app("--trust", str(LOOP), *keys)
    assert done.code == 0, done.err
    for step in done.metrics[1:]:
        assert 1 < step["num_turns/mean"] <= 3
        assert step["num_turns/max"] == 3
        assert step["response_length/max"] > 8
        assert 0 < step["reward/extra/first"] < 1


def test_an_estimator_with_a_loss(app):
    files = ["--trust", str(ESTIMATOR), "--trust", str(LOSS)]
    done = app(*files, f"algorithm.adv_estimator={ESTIMATOR}:ESTIMATOR", f"actor.policy_loss.loss_mode={LOSS}:LOSS")
    assert done.code == 0, done.err
    assert all(step["actor/penalty"] >= 0 for step in done.metrics[1:])


def test_a_weight_engine(app, tmp_path: Path):
    keys = ["checkpoint_engine.backend=file", f"checkpoint_engine.custom_backend_module={ENGINE}:FileEngine"]
    folder = f"checkpoint_engine.directory={tmp_path}/versions"
    done = app("--trust", str(ENGINE), *keys, folder, "placement=separate", "actor.optim.lr=1e-3")
    assert done.code == 0, done.err
    assert [step["weight_sync/version"] for step in done.metrics[1:]] == [1, 2]
    assert max(step["training/rollout_log_probs_diff_max"] for step in done.metrics[1:]) < 1e-4


def test_a_data_plane_backend(app, install_plugins, readme_code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = install_plugins("rl_transferqueue.backends", directory="someones_backend:Backend")
    (site / "someones_backend.py").write_text(readme_code("docs/guides", 0, "data_plane.md"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    (tmp_path / "blocks").mkdir()
    done = app("transfer_queue.backend=directory", f"transfer_queue.backend_address={tmp_path}/blocks")
    assert done.code == 0, done.err
    assert len(done.metrics) == 3
    assert list((tmp_path / "blocks").iterdir()) == []
