"""The README's examples run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rl_ckpt_engine import CheckpointEngineRegistry


def test_example_runs(readme_code: Callable[[str, int], str], capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {}
    exec(compile(readme_code("packages/rl-ckpt-engine", 0), "README.md", "exec"), space)
    assert "receivers=('rollout-0',)" in capsys.readouterr().out


def test_a_registered_engine(readme_code: Callable[[str, int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", {})
    space: dict[str, object] = {"__name__": "readme"}
    exec(compile(readme_code("packages/rl-ckpt-engine", 0, "docs/extending.md"), "README.md", "exec"), space)
    assert CheckpointEngineRegistry().get("mine") is space["MyEngine"]
