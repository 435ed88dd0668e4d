"""The release workflow accepts the tag of every package, and publishes nothing."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = sorted(file.parent.relative_to(ROOT).as_posix() for file in ROOT.glob("*/*/pyproject.toml"))


def job() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    return workflow["jobs"]["build"]


def checked(member: str, tag: str) -> subprocess.CompletedProcess[str]:
    """Run the step that compares the tag with the package."""
    (script,) = (step["run"] for step in job()["steps"] if step.get("name", "").startswith("The tag says"))
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=ROOT,
        env={**os.environ, "DIRECTORY": member, "TAG": tag},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize("member", MEMBERS)
def test_the_tag_of_a_package_is_accepted_and_another_refused(member: str):
    """Without fragments that the changelog lacks."""
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tag = f"{project['name']}=={project['version']}"
    done, waiting = checked(member, tag), any((ROOT / member).glob("changes/*"))
    assert done.returncode == waiting, done.stdout + done.stderr
    assert ("is not in the changelog" in done.stdout) == waiting
    refused = checked(member, f"{tag}.1")
    assert refused.returncode == 1
    assert f"ref is {tag}.1, the package says {tag}" in refused.stdout


def test_every_member_is_tested_before_it_is_built():
    """By its own folder of tests, or as rl-stack by the tests of the wheels alone."""
    without = {member for member in MEMBERS if not (ROOT / "tests" / _name(member).replace("-", "_")).is_dir()}
    assert without == {"packages/rl-stack"}


def test_nothing_is_published():
    commands = "\n".join(step.get("run", "") for step in job()["steps"])
    assert "uv build" in commands
    assert "publish" not in commands
    assert "upload" not in commands


def _name(member: str) -> str:
    return tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
