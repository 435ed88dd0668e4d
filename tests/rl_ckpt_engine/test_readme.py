"""The README's example runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "rl-ckpt-engine" / "README.md"


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    space: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), space)
    assert "receivers=('rollout-0',)" in capsys.readouterr().out
