"""Public names, imports, dependencies and doctests of the package."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import types

import pytest

import rl_protocol

MODULES = sorted(m.name for m in pkgutil.walk_packages(rl_protocol.__path__, "rl_protocol."))


def test_all_equals_reality():
    public = {
        name
        for name, value in vars(rl_protocol).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(rl_protocol.__all__)
    assert rl_protocol.__all__ == sorted(rl_protocol.__all__)


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy():
    heavy = "{'torch', 'ray', 'tensordict', 'transformers', 'vllm', 'pytest'}"
    for name in (
        "rl_protocol",
        "rl_protocol.ports",
        "rl_protocol.wire",
        "rl_protocol.rl_columns",
        "rl_protocol.testing.bigram_model",
        "rl_protocol.testing.memory_data_plane",
    ):
        assert fresh(f"import sys, {name}; print(sorted(sys.modules.keys() & {heavy}))").strip() == "[]"


def test_import_is_quick():
    """Measures CPU time of the importing thread and takes the best of several runs.

    This excludes the load of other processes.
    """
    code = "import time; t = time.thread_time(); import rl_protocol; print(time.thread_time() - t)"
    seconds: list[float] = []
    while len(seconds) < 8 and min(seconds, default=1.0) >= 0.2:
        seconds.append(float(fresh(code)))
    assert min(seconds) < 0.2


def test_base_install_has_at_most_three_dependencies():
    requires = importlib.metadata.requires("rl-protocol") or []
    base = [r for r in requires if "extra ==" not in r]
    assert sorted(re.split(r"[<>=]", r)[0] for r in base) == ["msgspec", "numpy", "psutil"]
    assert [r for r in base if r.startswith("psutil") and re.search(r"sys_platform != .linux.$", r)]
    assert len(base) <= 3


@pytest.mark.parametrize("name", ["rl_protocol", *MODULES])
def test_doctests(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_doctests_exist():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(found) >= 4
