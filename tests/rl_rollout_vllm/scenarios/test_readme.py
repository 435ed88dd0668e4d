"""The README's example runs as written, over the fake of vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import rl_rollout_vllm


def test_example_runs(readme_code, opened, other_weights, monkeypatch: pytest.MonkeyPatch):
    engine, client = opened()
    monkeypatch.setattr(rl_rollout_vllm, "VLLMRolloutEngine", lambda config: engine)
    trainer = SimpleNamespace(named_weights=lambda: other_weights)
    space = {"__name__": "__main__", "trainer": trainer}
    exec(compile(readme_code("packages/rl-rollout-vllm", 0), "README.md", "exec"), space)
    generations = space["generations"]
    assert len(generations) == 8
    assert engine.weight_version == 1
    assert client.closed
