"""CI, the workflows, the hooks and CONTRIBUTING.md use the recipes of the justfile only."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WEEKLY = {"headlines", "test-portable"}


def just(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("just")), "--justfile", str(ROOT / "justfile"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def recipes() -> dict[str, Any]:
    return json.loads(just("--dump", "--dump-format", "json"))["recipes"]


def called(text: str) -> set[str]:
    """Recipes that a text calls as `just NAME ...` or `recipe NAME ...`."""
    words = [line.split() for line in re.findall(r"(?:^recipe| just) ([a-z][^\n`|\"]*)", text, flags=re.MULTILINE)]
    return {word for line in words for word in line[:1] + [each for each in line[1:] if each in recipes()]}


def test_the_search_for_calls_finds_them():
    assert called('recipe lint\nrecipe format --check\n  - run: uv run just install test "tests/x"\n') == {
        *("lint", "format", "install", "test"),
    }


def test_every_recipe_says_what_it_is_for():
    assert [name for name, recipe in recipes().items() if not recipe["doc"]] == []


def test_contributing_shows_the_list():
    listed = just("--list", "--unsorted").splitlines()[1:]
    shown = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    assert [line for line in listed if line not in shown] == []
    assert called((ROOT / "CONTRIBUTING.md").read_text()) <= recipes().keys()


def test_ci_runs_recipes_and_all_that_check():
    run = called((ROOT / ".ci" / "run").read_text())
    checks = {"lint", "format", "types", "imports", "lock", "dependencies"}
    tests = {name for name in recipes() if name.startswith("test")} - {
        "test-nightly",
        "test-gpu",
        "test-peer",
        "test-portable",
    }
    assert run == checks | tests | {"install-vllm", "install-bridge"}


def test_the_workflows_run_what_ci_runs():
    run = set().union(*(called(path.read_text()) for path in WORKFLOWS))
    by_ci = called((ROOT / ".ci" / "run").read_text()) - {"install-vllm"}  # `uv run` installs that
    assert run - {"install", *WEEKLY} == by_ci


def test_what_takes_too_long_for_ci_runs_every_week():
    scheduled = [called(path.read_text()) for path in WORKFLOWS if "schedule:" in path.read_text()]
    assert set().union(*scheduled) == WEEKLY


def test_the_hooks_run_what_ci_runs():
    assert called((ROOT / ".pre-commit-config.yaml").read_text()) <= called((ROOT / ".ci" / "run").read_text())


def test_files_that_recipes_name_are_there():
    named = re.findall(r"(?:tests|benchmarks)/[\w./]+", (ROOT / "justfile").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_actions_are_pinned_by_commit_with_their_tag():
    used = [
        line.split("uses:")[1].strip()
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
