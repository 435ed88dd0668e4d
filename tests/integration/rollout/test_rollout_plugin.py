"""A rollout engine of an installed package generates in a run, and gets the actor's weights."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_the_example_of_the_guide_generates(app, install_plugins, readme_code, monkeypatch):
    site = install_plugins("rl_app_ppo.rollout_engines", one_by_one="someones_engine:ENGINE")
    (site / "someones_engine.py").write_text(readme_code("docs/guides", 0, "rollout_engine.md"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    done = app("rollout.name=one_by_one", "placement=separate", "rollout.n=2", "actor.optim.lr=1e-3")
    assert done.code == 0, done.err
    assert "one_by_one in float32" in done.out
    trained = done.metrics[1:]
    assert [metrics["weight_sync/version"] for metrics in trained] == [1, 2]
    assert max(metrics["training/rollout_log_probs_diff_max"] for metrics in trained) < 1e-4
