"""Rules for every member of the workspace."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = sorted(path.parent for pattern in ("packages/*", "apps/*") for path in ROOT.glob(f"{pattern}/pyproject.toml"))
SOURCES = sorted(path for member in MEMBERS for path in (member / "src").rglob("*.py"))
LOCAL_NAMES = ["pypi" + ".org", "registry" + ".npmjs", "/" + "work" + "/"]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
MAX_LINES = 600
MAX_MODULES = 15
MORE_MODULES = {"benchmarks": 20}
"""One script for each question."""
PROSE = 100
"""Columns of a line of Markdown prose; ruff checks docstrings and comments."""

each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def project(member: Path) -> dict[str, Any]:
    return tomllib.loads((member / "pyproject.toml").read_text())["project"]


def import_name(member: Path) -> str:
    return project(member)["name"].replace("-", "_")


@cache
def top(member: Path) -> ModuleType:
    return importlib.import_module(import_name(member))


def test_there_are_nine_members():
    assert len(MEMBERS) == 9


def test_the_meta_package_installs_what_the_workspace_does():
    """Besides the extras of rl-transferqueue that only tests and its own users need."""
    meta = {line.partition(">=")[0] for line in project(ROOT / "packages" / "rl-stack")["dependencies"]}
    root = {line.replace("[compat,metrics]", "") for line in project(ROOT)["dependencies"]}
    assert meta == root


@each_member
def test_a_member_has_its_papers(member: Path):
    package = member / "src" / import_name(member)
    wanted = [member / "README.md", member / "CHANGELOG.md", package / "py.typed", package / "__init__.py"]
    assert [short(path) for path in wanted if not path.is_file()] == []
    assert (member / "LICENSE").read_text() == (ROOT / "LICENSE").read_text(), "the build puts it into the wheel"
    facts = project(member)
    assert facts["license"] == "Apache-2.0"
    assert facts["readme"] == "README.md"
    assert f"## {facts['version']}" in (member / "CHANGELOG.md").read_text().splitlines()


@each_member
def test_version_is_said_once_in_two_places(member: Path):
    assert getattr(top(member), "__version__", None) == project(member)["version"]


@each_member
def test_all_equals_reality(member: Path):
    module = top(member)
    if not hasattr(module, "__all__"):
        return
    listed = set(module.__all__)
    defined = {name for name in vars(module) if not name.startswith("_")}
    modules = {name for name in defined if isinstance(getattr(module, name), ModuleType)}
    assert defined - modules <= listed
    assert [name for name in listed if not hasattr(module, name)] == []
    assert len(module.__all__) == len(listed)


@each_member
def test_ranges_on_siblings_are_bounded(member: Path):
    names = {project(m)["name"]: project(m)["version"] for m in MEMBERS}
    facts = project(member)
    extras = facts.get("optional-dependencies", {})
    for line in [*facts["dependencies"], *(line for extra in extras.values() for line in extra)]:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*(.*)", line)
        assert match is not None, line
        name, _, bounds = match.groups()
        if name in names and name != facts["name"]:
            major, minor, *_ = map(int, names[name].split("."))
            assert bounds == f">={major}.{minor},<{major}.{minor + 1}", f"{facts['name']}: {line}"
        elif name not in names:
            assert re.search(r"<|==", bounds), f"{facts['name']}: {line} has no upper bound"


def test_no_tracked_file_names_a_registry_or_a_place_of_work():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    found: list[str] = []
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if name == "uv.lock" or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        found += [f"{name}: {word}" for word in LOCAL_NAMES if word in text]
    assert found == []


def test_modules_are_short():
    long = {short(path): count for path in SOURCES if (count := len(path.read_text().splitlines())) > MAX_LINES}
    assert long == {}


def test_folders_are_small():
    """Count neither `__init__.py` nor `conftest.py`."""
    folders = {path.parent for path in [*SOURCES, *(ROOT / "benchmarks").rglob("*.py")]}
    counts = {
        short(folder): len(set(folder.glob("*.py")) - {folder / "__init__.py", folder / "conftest.py"})
        for folder in folders
    }
    assert {name: count for name, count in counts.items() if count > MORE_MODULES.get(name, MAX_MODULES)} == {}


def test_the_architecture_names_the_folders_of_each_package():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    lacking: list[str] = []
    for package in sorted({ROOT.joinpath(*path.relative_to(ROOT).parts[:4]) for path in SOURCES}):
        listed = re.search(rf"^{re.escape(short(package))}\n(.*?)^(?:\n|```)", text, flags=re.DOTALL | re.MULTILINE)
        named = re.findall(r"(\w+)/", listed[1]) if listed else []
        folders = [file.parent for file in package.glob("*/__init__.py")]
        lacking += [short(folder) for folder in folders if folder.name not in named]
    assert lacking == []


def test_lines_of_markdown_prose_are_short():
    long: list[str] = []
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("*/*/*.md"),
        *ROOT.glob("*/*/docs/*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "benchmarks" / "README.md",
    ]:
        text = re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), path.read_text(), flags=re.DOTALL)
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > PROSE and not line.startswith("|") and " " in line.strip():
                long.append(f"{short(path)}:{number}")
    assert long == []


def offences(source: str) -> list[tuple[int, str]]:
    """Line and reason of every forbidden construct in the source."""
    out: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                out += [(node.lineno, a.name) for a in names if a.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in FORBIDDEN_MODULES and [a.name for a in names] != ["UnpicklingError"]:
                    out.append((node.lineno, module))
                out += [(node.lineno, "os._exit") for a in names if (module, a.name) == ("os", "_exit")]
            case ast.Attribute(value=ast.Name(id="os"), attr="_exit"):
                out.append((node.lineno, "os._exit"))
            case ast.ExceptHandler(type=None):
                out.append((node.lineno, "bare except"))
            case _:
                pass
    return out


def test_the_search_for_offences_finds_them():
    assert offences("import pickle\nfrom cloudpickle import dumps\nimport os\nos._exit(1)\n") == [
        (1, "pickle"),
        (2, "cloudpickle"),
        (4, "os._exit"),
    ]
    assert offences("try:\n    pass\nexcept:\n    pass\nfrom os import _exit\n") == [
        (5, "os._exit"),
        (3, "bare except"),
    ]
    assert offences("from pickle import UnpicklingError\n") == []  # the name of an error runs nothing
    assert offences("from pickle import UnpicklingError, loads\n") == [(1, "pickle")]
    assert offences("import picklejar\ntry:\n    pass\nexcept ValueError:\n    pass\n") == []


def test_no_pickle_no_exit_no_bare_except():
    found = [f"{short(path)}:{line}: {why}" for path in SOURCES for line, why in offences(path.read_text())]
    assert found == []
