"""Public functions without a user are listed in `unused.toml`, and the list only shrinks.

Each entry has a reason and the issue that gives it a user, or the library that calls it.

A name has a user if product code (outside its own definition and re-exports), a benchmark, an entry
point or an example of a README mentions it. Names are compared as text: two functions of one name
count as one.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from packages import PACKAGES, ROOT

LIST = Path(__file__).with_name("unused.toml")
PROVIDED = ("/testing/", "/testing.py", "/compat/")
"""Conformance suites for users' tests, and TransferQueue's API: their users are elsewhere."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources() -> Iterator[Path]:
    for package in PACKAGES.values():
        yield from sorted(package.rglob("*.py"))


def definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(qualified name, name) of the public functions, classes and methods of a module."""
    for node in tree.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        yield node.name, node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner.name


def mentions(tree: ast.AST) -> Iterator[str]:
    """Names that code uses: loads, attributes, and strings such as "name" or "module:name"."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)) if found := re.fullmatch(r"(?:[\w.]+[.:])?([A-Za-z_]\w*)", text):
                yield found[1]
            case _:
                pass


def without_all(tree: ast.Module) -> ast.Module:
    """The module without its `__all__`, which lists names and uses none."""
    kept = [
        node
        for node in tree.body
        if not (
            isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        )
    ]
    return ast.Module(kept, type_ignores=[])


def used_names() -> Counter[str]:
    """Every name that product code, a benchmark, an entry point or an example uses."""
    used: Counter[str] = Counter()
    for path in [*sources(), *sorted((ROOT / "benchmarks").rglob("*.py")), *ROOT.glob("*/*/examples/*.py")]:
        used.update(mentions(without_all(ast.parse(path.read_text(encoding="utf-8")))))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*/*.md"), *ROOT.glob("*/*/docs/*.md")]:
        examples = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        used.update(name for code in examples for name in mentions(ast.parse(code)))
    for path in ROOT.glob("*/*/pyproject.toml"):
        used.update(re.findall(r":(\w+)\"", path.read_text(encoding="utf-8")))
    return used


def unused() -> set[str]:
    """`module:Class.method` of every public function, class or method without a user."""
    used, found = used_names(), set[str]()
    for package in PACKAGES.values():
        for path in sorted(package.rglob("*.py")):
            if any(part in path.as_posix() for part in PROVIDED):
                continue
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {f"{module}:{full}" for full, name in definitions(tree) if not used[name]}
    return found


def test_public_functions_without_a_user_are_listed():
    listed = tomllib.loads(LIST.read_text(encoding="utf-8"))
    assert sorted(unused() - listed.keys()) == [], "give these a user, make them private, or delete them"
    assert sorted(listed.keys() - unused()) == [], "these have a user or are gone: remove them from unused.toml"
    for name, entry in listed.items():
        assert entry["reason"], name
        assert isinstance(entry.get("issue"), int) != ("called_by" in entry), name
