"""The public signatures of the packages as text, in `tests/workspace/signatures/PACKAGE.txt`.

    uv run --group dev just signatures

writes the files. `test_signatures.py` compares them with the code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

from packages import PACKAGES, ROOT

FOLDER = ROOT / "tests" / "workspace" / "signatures"
HEAVY = {"rl_megatron_peft.backend", "rl_rollout_vllm.vllm_worker"}
"""Folders whose import needs an engine that not every environment has."""


def public_modules(package: str) -> Iterator[str]:
    """The package and every folder or module of it that has an `__all__`."""
    for path in sorted(PACKAGES[package].rglob("*.py")):
        parts = (package, *path.relative_to(PACKAGES[package]).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY):
            continue
        assigned = (node.targets[0] for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in assigned):
            yield name


class Shown:
    """A default as the snapshot shows it."""

    def __init__(self, value: object) -> None:
        plain = isinstance(value, bool | int | float | str | None) or value == ()
        self.text = repr(value) if plain else "..."

    def __repr__(self) -> str:
        return self.text


def parameters(value: object) -> tuple[list[str], str]:
    """Parameters and result of a callable as written in the source; empty if it has none."""
    try:
        found = inspect.signature(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return [], ""
    out: list[str] = []
    keyword_only = False
    for each in found.parameters.values():
        if each.kind is inspect.Parameter.VAR_POSITIONAL:
            keyword_only = True
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            out.append("*")
            keyword_only = True
        default = each.default if each.default is inspect.Parameter.empty else Shown(each.default)
        annotation = each.annotation
        if isinstance(annotation, str):
            each = each.replace(annotation=inspect.Parameter.empty)
        text = str(each.replace(default=inspect.Parameter.empty))
        text += f": {annotation}" if isinstance(annotation, str) else ""
        out.append(text if default is inspect.Parameter.empty else f"{text} = {default!r}")
    result = found.return_annotation
    return out, "" if result is inspect.Signature.empty else f" -> {result}"


def written(start: str, value: object, indent: str = "") -> Iterator[str]:
    """A callable on one line, or on one line per parameter where it is long."""
    names, result = parameters(value)
    line = f"{indent}{start}({', '.join(names)}){result}"
    if len(line) <= 100:
        yield line
        return
    yield f"{indent}{start}("
    for name in names:
        yield f"{indent}    {name},"
    yield f"{indent}){result}"


def members(cls: type) -> Iterator[str]:
    """Public methods and properties that a class defines itself."""
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_"):
            continue
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property):
            yield f"    {name}: {parameters(value.fget)[1].removeprefix(' -> ')}"
        elif inspect.isroutine(inner):
            kind = type(value).__name__ + " " if isinstance(value, classmethod | staticmethod) else ""
            start = "async " if inspect.iscoroutinefunction(inner) else ""
            yield from written(f"{start}{kind}{name}", inner, "    ")


def describe(name: str, value: object) -> Iterator[str]:
    """A public thing; a class is followed by its members."""
    if isinstance(value, type):
        bases = "/".join(base.__name__ for base in value.__bases__ if base is not object)
        start = f"class {name} [{bases}]" if bases else f"class {name}"
        fields = getattr(value, "__struct_fields__", None) or "__init__" in vars(value)
        if fields and "Protocol" not in bases:
            yield from written(start, value)
        else:
            yield start
        yield from members(value)
    elif callable(value):
        yield from written(f"{'async ' if inspect.iscoroutinefunction(value) else ''}{name}", value)
    elif isinstance(value, ModuleType):
        yield f"module {name}"
    else:
        yield f"{name}: {type(value).__name__}"


def text(package: str) -> str:
    """All public modules of a package, their names in alphabetical order."""
    lines: list[str] = []
    for name in public_modules(package):
        module = importlib.import_module(name)
        lines.append(f"# {name}")
        for public in sorted(module.__all__):
            lines += describe(public, getattr(module, public))
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the snapshot of every package."""
    FOLDER.mkdir(exist_ok=True)
    for package in PACKAGES:
        if content := text(package):
            (FOLDER / f"{package}.txt").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
