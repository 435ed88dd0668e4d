"""What a document tells a reader to run or to install is there, also in its prose."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import typer

from rl_app_ppo.cli.rl import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "packages/*/*.md",
        "packages/*/docs/*.md",
        "apps/*/*.md",
        "apps/*/docs/*.md",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"
] + [ROOT / "benchmarks" / "README.md"]  # the commands of RESULTS.md are those of the commits that it names
STARTERS = ("uv run ", "rl ", "just ", "pip install ")


def written(path: Path) -> Iterator[str]:
    """Commands of a document: lines of its blocks, and spans of code in its prose."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for one in (*lines, *indented, *spans):
        for part in " ".join(one.split()).split(" && "):
            if part.startswith(STARTERS):
                yield part


def commands() -> list[tuple[str, str]]:
    return [(path.relative_to(ROOT).as_posix(), one) for path in DOCUMENTS for one in written(path)]


def test_packages_and_extras_that_are_installed_are_there():
    members = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in ROOT.glob("*/*/pyproject.toml")]
    extras = {one["name"]: {*one.get("optional-dependencies", {})} for one in members}
    seen: set[str] = set()
    for document, line in commands():
        for name, group in re.findall(r"(?<![\w-])(rl-[a-z-]+)(?:\[([\w,]+)\])?", line.partition("#")[0]):
            if line.startswith("pip install "):
                assert name in extras, f"{document}: {line}"
                assert {*filter(None, group.split(","))} <= extras[name], f"{document}: {line}"
                seen.add(name)
    assert len(seen) > 6


def test_extras_of_the_workspace_are_there():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = {*root["project"]["optional-dependencies"]}, {*root["dependency-groups"]}
    for document, line in commands():
        extras, groups = (set(re.findall(rf"--{kind} ([\w-]+)", line)) for kind in ("extra", "group"))
        if line.startswith("uv "):
            assert extras <= known[0], f"{document}: {line}"
            assert groups <= known[1], f"{document}: {line}"


def test_programs_and_commands_are_there():
    ours = {"rl": {*typer.main.get_command(app).commands}}  # pyright: ignore[reportAttributeAccessIssue]
    ours["just"] = set(
        re.findall(r"^([a-z][\w-]*)(?: \*?[A-Z]+)*:", (ROOT / "justfile").read_text(), flags=re.MULTILINE)
    )
    counted = 0
    for document, line in commands():
        words = re.sub(r"--(extra|group|directory) \S+ ?", "", line.partition("#")[0]).split()
        words = words[2:] if words[:2] == ["uv", "run"] else words
        counted += 1
        if words[0] in ours:
            assert len(words) == 1 or words[1].startswith("-") or words[1] in (*ours[words[0]], "NAME"), (
                document,
                line,
            )
        elif words[0] != "pip":
            places = (ROOT / words[0], Path(sys.executable).parent / words[0])
            assert any(place.exists() for place in places), f"{document}: {line}"
        if words[0] == "python" and not words[1].startswith("-"):
            assert (ROOT / words[1]).is_file(), f"{document}: {line}"
    assert counted > 150
