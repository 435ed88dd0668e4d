"""The committed bundle is what the sources in report_ui/ give."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_app_ppo.report.page import bundled

SOURCES = Path(__file__).parents[3] / "apps" / "ppo" / "report_ui"


def test_the_lock_names_no_registry():
    lock = json.loads((SOURCES / "package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert all("resolved" not in package and package["integrity"] for package in packages.values())


@pytest.mark.slow
def test_the_bundle_is_built_from_the_committed_sources(tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("THE BUNDLE OF THE REPORT IS NOT COMPARED WITH ITS SOURCES: npm is not installed")
    ui = tmp_path / "ui"
    shutil.copytree(SOURCES, ui, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(
        ["npm", "ci", "--ignore-scripts"], cwd=ui, capture_output=True, text=True, timeout=300, check=False
    )
    if installed.returncode:
        pytest.skip(
            f"THE BUNDLE OF THE REPORT IS NOT COMPARED WITH ITS SOURCES: npm ci failed: {installed.stderr[-300:]}"
        )
    environment = {**os.environ, "OUT": str(tmp_path / "out")}
    for command in (["npx", "tsc", "--noEmit"], ["npm", "run", "build"]):
        done = subprocess.run(
            command, cwd=ui, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("report.js", "report.css"):
        assert (tmp_path / "out" / name).read_text() == bundled(name), f"run `npm run build` in {SOURCES}"
