"""The script that tells CI which packages a change touches."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changes", ROOT / ".github" / "changes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["changes"] = module
    spec.loader.exec_module(module)
    return module


changes = load()
Member = changes.Member
WORLD = {
    "base": Member("base", "packages/base", frozenset()),
    "left": Member("left", "packages/left", frozenset({"base"})),
    "right-side": Member("right-side", "packages/right", frozenset({"base"})),
    "app": Member("app", "apps/app", frozenset({"left"})),
}
ALL = sorted(WORLD)


@pytest.mark.parametrize(
    ("paths", "want"),
    [
        ([], []),
        (["packages/base/src/base/x.py"], ALL),
        (["packages/left/src/left/x.py"], ["app", "left"]),
        (["packages/right/README.md"], ["right-side"]),
        (["apps/app/pyproject.toml"], ["app"]),
        (["tests/right_side/test_x.py"], ["right-side"]),
        (["tests/base/test_x.py"], ["base"]),
        (["tests/base/test_x.py", "apps/app/a.py"], ["app", "base"]),
        (["tests/contracts/test_x.py"], ALL),
        (["uv.lock"], ALL),
        (["pyproject.toml"], ALL),
        ([".ci/run"], ALL),
        ([".github/workflows/ci.yml"], ALL),
        (["README.md", "LICENSE", "docs/x.png", "benchmarks/bench_x.py"], []),
        (["packages/leftover/x.py"], ALL),
    ],
)
def test_touched(paths: list[str], want: list[str]):
    assert changes.touched(paths, WORLD) == want


def test_closure():
    assert changes.closure("app", WORLD) == {"app", "left", "base"}
    assert changes.closure("base", WORLD) == {"base"}
    loop = {"a": Member("a", "a", frozenset({"b"})), "b": Member("b", "b", frozenset({"a"}))}
    assert changes.closure("a", loop) == {"a", "b"}


def test_requirements_are_read_by_name_and_extras_count():
    project = {
        "dependencies": ["base>=0.1,<0.2", "numpy>=1.26", "with-extra[torch]>=1 ; python_version > '3'"],
        "optional-dependencies": {"x": ["left[y] >= 2"]},
    }
    assert changes.requirements(project) == {"base", "numpy", "with-extra", "left"}


def test_this_workspace():
    workspace = changes.members()
    assert set(changes.closure("rl-app-ppo", workspace)) >= {"rl-protocol", "rl-trainer", "rl-transferqueue"}
    assert workspace["rl-protocol"].needs == frozenset()
    for name, member in workspace.items():
        assert "rl-protocol" in changes.closure(name, workspace)
        assert (ROOT / member.folder / "pyproject.toml").is_file()
    assert changes.touched(["packages/rl-protocol/x.py"], workspace) == sorted(workspace)
    assert "rl-transferqueue" not in changes.touched(["packages/rl-ckpt-engine/x.py"], workspace)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / ".github" / "changes.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


def test_command_line():
    assert json.loads(run("HEAD").stdout) == []
    assert json.loads(run("HEAD", "HEAD").stdout) == []
    assert json.loads(run("0" * 40, "HEAD").stdout) == sorted(changes.members())
    assert json.loads(run("--closure", "rl-trainer").stdout) == ["rl-protocol", "rl-trainer"]
    for wrong in ((), ("--closure",), ("--closure", "nope"), ("a", "b", "c")):
        assert run(*wrong).returncode == 2
