"""Changes that users notice are fragments, which a release writes into the changelog."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHANGELOGS = sorted([*ROOT.glob("packages/*/CHANGELOG.md"), *ROOT.glob("apps/*/CHANGELOG.md")])
FRAGMENTS = sorted([*ROOT.glob("packages/*/changes/*"), *ROOT.glob("apps/*/changes/*")])
MARK = "<!-- towncrier release notes start -->"


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: f"{path.parts[-3]}-{path.name}")
def test_a_fragment_has_a_kind_and_a_sentence(fragment: Path):
    assert re.fullmatch(r"\+[a-z0-9-]+\.(added|changed|fixed|removed)\.md", fragment.name)
    text = fragment.read_text(encoding="utf-8")
    assert text.endswith(".\n")
    assert max(map(len, text.splitlines())) <= 98  # the changelog indents it by two


@pytest.mark.parametrize("changelog", CHANGELOGS, ids=lambda path: path.parts[-2])
def test_new_versions_go_below_the_title(changelog: Path):
    title, _, mark, _, version, *_ = changelog.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# Changelog of rl-")
    assert mark == MARK
    assert version.startswith("## ")


def test_a_release_writes_the_fragments_into_the_changelog(tmp_path: Path):
    package = tmp_path / "packages" / "rl-x"
    (package / "changes").mkdir(parents=True)
    (package / "CHANGELOG.md").write_text(f"# Changelog of rl-x\n\n{MARK}\n\n## 0.1.0\n\n### Added\n\n- All.\n")
    (package / "changes" / "+speed.changed.md").write_text("Faster\nthan before.\n")
    (package / "changes" / "+table.added.md").write_text("A table.\n")
    write = ["--yes", "--config", str(ROOT / "pyproject.toml"), "--dir", str(package), "--name", "rl-x"]
    for command in (
        ["git", "init", "-q"],
        ["git", "add", "-A"],
        ["git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"],
        [sys.executable, "-m", "towncrier", "build", *write, "--version", "0.2.0"],  # the recipe of just
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (package / "CHANGELOG.md").read_text().split() == (
        f"# Changelog of rl-x {MARK} ## 0.2.0 ### Added - A table. ### Changed - Faster than before. "
        "## 0.1.0 ### Added - All."
    ).split()
    assert list(package.glob("changes/*")) == []
