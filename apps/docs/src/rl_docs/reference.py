"""Pages made from the code: the public names of each package, and the commands of `rl`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import typer.main
from typer.core import TyperGroup

from rl_app_ppo.cli.rl import app
from rl_docs.repository import SOURCES


def reference_pages() -> dict[str, str]:
    """Return path -> Markdown of each page. The packages are read, not imported."""
    pages = {"reference/rl.md": _commands()}
    for source in SOURCES:
        (package,) = (path for path in source.iterdir() if (path / "__init__.py").is_file())
        pages[f"reference/{package.name}.md"] = _names(package)
    return pages


def _names(package: Path) -> str:
    lines = [f"# {package.name}", ""]
    for module in _public_modules(package):
        dotted = ".".join(module.relative_to(package.parent).parts)
        lines += [f"::: {dotted}", ""]
    return "\n".join(lines)


def _public_modules(package: Path) -> Iterator[Path]:
    """Yield the folders whose `__init__.py` lists public names."""
    for file in sorted(package.rglob("__init__.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                yield file.parent


def _commands() -> str:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    lines = ["# Commands of rl", "", f"{group.help}", ""]
    for name, command in group.commands.items():
        if command.hidden:
            continue
        context = typer.Context(command)
        lines += [f"## rl {name}", "", f"`rl {' '.join([name, *command.collect_usage_pieces(context)])}`", ""]
        lines += [f"{command.help}", ""]
        records = [record for each in command.params if (record := each.get_help_record(context)) is not None]
        lines += [f"* `{parameter}`: {text or 'required'}" for parameter, text in records]
        lines.append("")
    return "\n".join(lines)
