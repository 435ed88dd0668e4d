"""The README's example runs as written."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def test_example_runs(readme_code: Callable[[str, int], str], capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {}
    exec(compile(readme_code("packages/rl-ckpt-engine", 0), "README.md", "exec"), space)
    assert "receivers=('rollout-0',)" in capsys.readouterr().out
