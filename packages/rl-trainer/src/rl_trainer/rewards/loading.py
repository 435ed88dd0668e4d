"""Finds and loads a reward function: from this package, an installed package or an allowed file.

Installed packages provide functions as entry points in the group `rl_trainer.rewards`; the file
that RL_PLUGINS names lists those that may be loaded (`rl_protocol.support.plugins`). A file,
`path.py:function`, is loaded only from the folders in the environment variable RL_REWARD_PATH
(separated as in PATH), so that a configuration from another person can't run arbitrary files. Code
from outside this package runs in separate processes with limits, and is not sandboxed further.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from rl_protocol import ConfigError
from rl_protocol.support.options import nearest
from rl_protocol.support.plugins import check_installed, load_installed
from rl_trainer.config.registry import installed

ENTRY_POINTS = "rl_trainer.rewards"
ALLOWED_FOLDERS = "RL_REWARD_PATH"
BUILT_IN: Mapping[str, str] = {
    "by_data_source": "rl_trainer.rewards.by_data_source:score",
    "countdown": "rl_trainer.rewards.countdown:score",
    "exact_match": "rl_trainer.rewards.functions:exact_match",
    "gsm8k": "rl_trainer.rewards.gsm8k:score",
    "gsm8k_flexible": "rl_trainer.rewards.gsm8k:score_flexible",
    "math": "rl_trainer.rewards.math:score",
}
HARMLESS = frozenset({"exact_match", "gsm8k", "gsm8k_flexible"})
"""Built-in functions that return quickly for any response; they need no separate process."""


def check_reward(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check without importing it that the function exists and may be loaded.

    Raises:
        ConfigError: says what is missing and what to do.
    """
    found = _find(name, environment)
    if isinstance(found, Path):
        _check_source(found, name)
    elif name not in BUILT_IN:  # importlib_metadata has its own EntryPoint class
        check_installed(found, environment)


def _check_source(path: Path, name: str) -> None:
    """Check that the file is valid Python and defines the function, without running it."""
    function = name.rpartition(":")[2]
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"load_reward.name={name!r} can't be loaded: {path}, {where}. Fix the file.") from error
    names = set(_names(tree.body))
    if function not in names and not names & {"*", "__getattr__"}:
        functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        raise ConfigError(
            f"load_reward.name={name!r}: {path} defines no {function!r}; its functions are {', '.join(functions) or 'none'}."
            f"{nearest(function, functions)}"
        )


def _names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that these statements bind, including those within if, try, with and loops."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
            yield from _names([child for child in inner if isinstance(child, ast.stmt)])
            yield from _names([stmt for child in inner if isinstance(child, ast.ExceptHandler) for stmt in child.body])
            yield from (
                one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            )


def load_reward(name: str, environment: Mapping[str, str] = os.environ) -> Callable[..., Any]:
    """Import the function.

    Raises:
        ConfigError: as `check_reward`, or it can't be imported.
    """
    found = _find(name, environment)
    try:
        if isinstance(found, Path):
            return getattr(_module(found), name.rpartition(":")[2])
        loaded: Any = found.load() if name in BUILT_IN else load_installed(found, environment)
        return loaded
    except ConfigError:
        raise
    except Exception as error:  # boundary to user code: importing it may raise anything
        raise ConfigError(f"load_reward.name={name!r} can't be loaded: {type(error).__name__}: {error}.") from error


def reward_names() -> list[str]:
    """The names of the built-in reward functions, and of those that installed packages offer."""
    return sorted({*BUILT_IN, *(entry.name for entry in installed(ENTRY_POINTS))})


def _find(name: str, environment: Mapping[str, str]) -> EntryPoint | Path:
    if ":" in name:
        return _allowed_file(name, environment)
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], ENTRY_POINTS)
    offered = installed(ENTRY_POINTS)
    found = [entry for entry in offered if entry.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(entry.value for entry in found)
        raise ConfigError(f"load_reward.name={name!r} is offered by several packages: {where}. Uninstall all but one.")
    known = reward_names()
    raise ConfigError(
        f"load_reward.name={name!r} is not known; known are {', '.join(known)}.{nearest(name, known)} Write path.py:function to use your own, "
        f"or install a package with an entry point in {ENTRY_POINTS!r}."
    )


def _allowed_file(name: str, environment: Mapping[str, str]) -> Path:
    file, _, function = name.rpartition(":")
    path = allowed_path(file, environment)
    if path.suffix != ".py" or not function.isidentifier():
        raise ConfigError(f"load_reward.name={name!r} must be path.py:function; {path} is not a Python file.")
    return path


def allowed_path(file: str, environment: Mapping[str, str]) -> Path:
    """The resolved path of a file that may be loaded.

    Raises:
        ConfigError: the file does not exist, is in none of the folders of RL_REWARD_PATH, or is
            writable by everyone.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"load_reward.name={file!r}: {path} does not exist.")
    folders = [
        Path(one).expanduser().resolve() for one in environment.get(ALLOWED_FOLDERS, "").split(os.pathsep) if one
    ]
    if not any(path.is_relative_to(folder) for folder in folders):
        raise ConfigError(
            f"load_reward.name={file!r}: reward files load only from the folders in the environment variable {ALLOWED_FOLDERS}. "
            f"If you trust this file, set {ALLOWED_FOLDERS}={path.parent}."
        )
    if path.stat().st_mode & 0o002:
        raise ConfigError(f"load_reward.name={file!r}: {path} is writable by everyone; run chmod o-w {path}.")
    return path


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "so it has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
