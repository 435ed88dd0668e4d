"""Classes inherit at most two deep: a class, its base, and the interface or base of that one.

Errors are left out: a deeper tree of errors is a classification, which callers catch at any level.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from packages import PACKAGES

MOST_ANCESTORS = 2
Class = tuple[str, str]
"""(module, name)."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Module -> its source."""
    found: dict[str, ast.Module] = {}
    for root in map(Path, PACKAGES.values()):
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@functools.cache
def classes(module: str) -> dict[str, ast.ClassDef]:
    """Name -> class, of the classes of a module and within its classes and functions."""
    tree = trees().get(module, ast.Module([], []))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def defined(module: str, name: str) -> Class | None:
    """Where a class that a module names is defined; None: in no package of ours."""
    if name in classes(module):
        return module, name
    for node in trees()[module].body if module in trees() else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and (found := defined(node.module, alias.name)):
                    return found
    return None


def base_name(base: ast.expr) -> str:
    """The name of a base, without its type arguments and module."""
    if isinstance(base, ast.Subscript):
        return base_name(base.value)
    return base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""


@functools.cache
def ancestors(one: Class) -> tuple[Class, ...]:
    """The longest line of ancestors of ours, nearest first."""
    module, name = one
    above = [found for base in classes(module)[name].bases if (found := defined(module, base_name(base)))]
    return max(((found, *ancestors(found)) for found in above if found != one), key=len, default=())


def test_classes_inherit_at_most_two_deep() -> None:
    lines = {one: ancestors(one) for module in trees() for one in ((module, name) for name in classes(module))}
    assert max(map(len, lines.values())) > MOST_ANCESTORS, "errors are deeper, so the test sees imported bases"
    deep = {
        one: line
        for one, line in lines.items()
        if len(line) > MOST_ANCESTORS and line[-1] != ("rl_protocol.errors", "RLError")
    }
    assert deep == {}, "take what the base does as a part (composition) instead of inheriting it"
