"""The tests of a module are found by its name: tests/rl_x/folder/test_module.py.

Tests that span modules lie in tests/rl_x/scenarios/.
"""

from __future__ import annotations

import pytest
from packages import PACKAGES, ROOT


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_test_is_named_for_a_module(package: str):
    tests = ROOT / "tests" / package
    lost: list[str] = []
    for path in sorted(tests.rglob("test_*.py")):
        inside = path.relative_to(tests)
        if "scenarios" in inside.parts:
            continue
        module = PACKAGES[package] / inside.parent / inside.stem.removeprefix("test_")
        if not module.with_suffix(".py").is_file() and not (module / "__init__.py").is_file():
            lost.append(inside.as_posix())
    assert lost == [], "name it for the module it tests, or move it to scenarios/"
