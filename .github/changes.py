"""Which packages does a change touch? A package is touched by its own files, its tests, and anything it depends on in this workspace.

    python .github/changes.py BASE [HEAD]      packages touched by the commits between, as one JSON line
    python .github/changes.py --closure NAME   NAME and the members it depends on

Files that belong to no package but shape all of them (the lock, the root pyproject, CI itself, shared tests) touch every package;
documents at the root touch none. When BASE is not a commit that is here (the first push of a branch), every package is touched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Member:
    """One package of the workspace; `folder` is relative to the root, `needs` are the members it names in any requirement."""

    name: str
    folder: str
    needs: frozenset[str]

    @property
    def tests(self) -> str:
        return f"tests/{self.name.replace('-', '_')}"


def members(root: Path = ROOT) -> dict[str, Member]:
    """All members of the workspace by name."""
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    projects = {
        path.parent.relative_to(root).as_posix(): tomllib.loads(path.read_text())["project"]
        for pattern in patterns
        for path in sorted(root.glob(f"{pattern}/pyproject.toml"))
    }
    names = {project["name"] for project in projects.values()}
    return {
        project["name"]: Member(project["name"], folder, frozenset(requirements(project) & names - {project["name"]}))
        for folder, project in projects.items()
    }


def requirements(project: Mapping[str, object]) -> set[str]:
    """Names of everything a project may require, extras included."""
    extras = project.get("optional-dependencies", {})
    assert isinstance(extras, dict)
    lines = [*_lines(project.get("dependencies", [])), *(line for extra in extras.values() for line in _lines(extra))]
    return {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in lines}


def _lines(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(line) for line in value]


def closure(name: str, workspace: Mapping[str, Member]) -> set[str]:
    """The package and every member it depends on, directly or not."""
    found: set[str] = set()
    queue = [name]
    while queue:
        member = queue.pop()
        if member not in found:
            found.add(member)
            queue.extend(workspace[member].needs)
    return found


def touched(paths: Iterable[str], workspace: Mapping[str, Member]) -> list[str]:
    """Packages whose dependency closure holds a changed file, sorted; tests of a package touch that package alone."""
    out: set[str] = set()
    for path in paths:
        owner = next((m.name for m in workspace.values() if path.startswith(m.folder + "/")), None)
        tested = next((m.name for m in workspace.values() if path.startswith(m.tests + "/")), None)
        if owner is not None:
            out |= {name for name in workspace if owner in closure(name, workspace)}
        elif tested is not None:
            out.add(tested)
        elif not (path.endswith(".md") or path.startswith(("docs/", "benchmarks/")) or path == "LICENSE"):
            out |= set(workspace)
    return sorted(out)


def changed_paths(base: str, head: str) -> list[str]:
    """Paths that differ between the merge base of two commits and the second one."""
    command = ["git", "diff", "--name-only", "--no-renames", f"{base}...{head}"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def known(commit: str) -> bool:
    """Whether the commit is in this clone."""
    command = ["git", "cat-file", "-e", commit + "^{commit}"]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0


def main(arguments: list[str]) -> int:
    """Write one JSON line to standard output."""
    workspace = members()
    match arguments:
        case ["--closure", name] if name in workspace:
            answer = sorted(closure(name, workspace))
        case [base, *rest] if base != "--closure" and len(rest) <= 1:
            head = rest[0] if rest else "HEAD"
            answer = touched(changed_paths(base, head), workspace) if known(base) else sorted(workspace)
        case _:
            sys.stderr.write(f"{__doc__}\nPackages: {', '.join(workspace)}\n")
            return 2
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
