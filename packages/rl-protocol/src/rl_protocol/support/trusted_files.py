"""Files of code that a run may load, named as `path.py:name`: one rule for every kind of plug-in.

A file loads if its content is the one that the user has allowed: RL_TRUSTED_FILES, a JSON object,
maps its path to its sha256. The command line sets it for the files of `--trust`, and for those that
the user allows when asked; a configuration file can't. Workers get it from the driver, and each
host checks its own file. A file that everyone may write never loads.

The code that runs is the code that was checked: the file is read once. What it imports is not
checked. Code is not sandboxed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, find_spec, module_from_spec
from pathlib import Path
from symtable import symtable
from types import CodeType, ModuleType
from typing import Any

import msgspec

from rl_protocol.errors import ConfigError, located_error
from rl_protocol.support.options import nearest

FILES = "RL_TRUSTED_FILES"
SUFFIX = ".py"


class _ReadFile(InspectLoader):
    """Loads a module from a content that was read before, and not again from its path."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return decode_source(self._content)

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return self.source_to_code(self._content, str(self._path))


def names_file(name: str) -> bool:
    """Whether the name of a plug-in is `path.py:name`."""
    return name.rpartition(":")[0].endswith(SUFFIX)


def read_trusted(file: str, key: str, environment: Mapping[str, str] = os.environ) -> tuple[Path, bytes]:
    """The resolved path of a file that may be loaded, and the content that was checked.

    Args:
        file: its path.
        key: the setting that names it, for messages.
        environment: has RL_TRUSTED_FILES.

    Raises:
        ConfigError: the file does not exist, is not trusted, has changed, or is writable by
            everyone.
    """
    path = Path(file).expanduser().resolve()
    try:
        content = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        wrong = "does not exist" if isinstance(error, FileNotFoundError) else f"can't be read: {error}"
        raise ConfigError(f"{key}={file!r}: {path} {wrong}.") from error
    if mode & 0o002:
        raise ConfigError(f"{key}={file!r}: {path} is writable by everyone; run chmod o-w {path}.")
    listed = trusted_files(environment).get(str(path))
    if listed is None:
        raise ConfigError(
            f"{key}={file!r}: {path} is code that you have not allowed. If you trust it, add --trust {shlex.quote(file)} to the command; "
            f"in Python, trust=[{file!r}] to train()."
        )
    if listed != digest(content):
        raise ConfigError(
            f"{key}={file!r}: {path} has sha256 {digest(content)} on this host; trusted is {listed}. Look at the change and start again."
        )
    return path, content


def trusted_files(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Resolved path -> sha256 of each file in RL_TRUSTED_FILES.

    Raises:
        ConfigError: it is no JSON object of texts.
    """
    try:
        return msgspec.json.decode(environment.get(FILES) or "{}", type=dict[str, str])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"{FILES} must be a JSON object of paths and sha256; {error}.") from error


def given_files(files: Iterable[Path], argument: str) -> dict[str, str]:
    """Resolved path -> sha256 of files that the user allows.

    Args:
        files: their paths.
        argument: what names them, for messages.

    Raises:
        ConfigError: one can't be read.
    """
    return dict(_given(path.expanduser(), argument) for path in files)


def variables_for(allowed: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that allows these files besides those that it allows now.

    Args:
        allowed: resolved path -> sha256.

    Raises:
        ConfigError: RL_TRUSTED_FILES is damaged.
    """
    return {FILES: msgspec.json.encode(trusted_files() | dict(allowed)).decode()} if allowed else {}


def digest(content: bytes) -> str:
    """The sha256 of a file's content, in hex."""
    return hashlib.sha256(content).hexdigest()


def check_object(name: str, key: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check, without running it, that `path.py:name` may be loaded and defines the name.

    Raises:
        ConfigError: as `read_trusted`, or the file is no Python, lacks the name, or imports a
            module that is not installed.
    """
    file, _, attribute = _split(name, key)
    path, content = read_trusted(file, key, environment)
    try:
        tree = ast.parse(content)
        symtable(decode_source(content), str(path), "exec")  # finds more, such as two parameters of one name
    except (SyntaxError, ValueError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{key}={name!r} can't be loaded: {path}, {where}. Fix the file.") from error
    names = set(_names(tree.body))
    if attribute not in names and not names & {"*", "__getattr__"}:
        raise _lacks(name, key, path, {one for one in names if not one.startswith("_")})
    for line, module in _imports(tree.body):
        if module not in sys.modules and find_spec(module) is None:
            raise ConfigError(
                f"{key}={name!r} can't be loaded: {path}, line {line} imports {module!r}, which is not installed. Install it; for a "
                f"module in the folder of the file, set PYTHONPATH={shlex.quote(str(path.parent))}."
            )


def find_object(name: str, key: str, environment: Mapping[str, str] = os.environ) -> str:
    """Where `path.py:name` defines a function or class, as `path.py:3`; empty: something else.

    Raises:
        ConfigError: as `read_trusted`.
    """
    path, found = _definition(name, key, environment)
    return f"{path}:{found.lineno}" if found else ""


def written_signature(name: str, key: str, environment: Mapping[str, str] = os.environ) -> inspect.Signature | None:
    """The signature of the function `path.py:name`, without running the file; each default is an
    ellipsis.

    Returns:
        None if only running the file can tell: it is no function, or one with decorators.

    Raises:
        ConfigError: as `read_trusted`.
    """
    _, found = _definition(name, key, environment)
    if found is None or isinstance(found, ast.ClassDef) or found.decorator_list:
        return None
    return inspect.Signature(list(_parameters(found.args)))


def written_literal(name: str, key: str, environment: Mapping[str, str] = os.environ) -> str:
    """The type of the literal that `path.py:name` is, without running the file, as `int`; empty: it
    is no literal, or only running the file can tell.

    Raises:
        ConfigError: as `read_trusted`.
    """
    _, attribute, body = _statements(name, key, environment)
    binding = [one for one in body if attribute in _names([one])]
    match binding[-1:]:
        case [ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(value=ast.expr() as value)]:
            with suppress(ValueError, TypeError):
                return type(ast.literal_eval(value)).__name__
        case _:
            pass
    return ""


def _parameters(given: ast.arguments) -> Iterator[inspect.Parameter]:
    kind = inspect.Parameter
    required = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    for place, one in enumerate([*given.posonlyargs, *given.args]):
        how = kind.POSITIONAL_ONLY if place < len(given.posonlyargs) else kind.POSITIONAL_OR_KEYWORD
        yield kind(one.arg, how, default=kind.empty if place < required else ...)
    if given.vararg:
        yield kind(given.vararg.arg, kind.VAR_POSITIONAL)
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield kind(one.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...)
    if given.kwarg:
        yield kind(given.kwarg.arg, kind.VAR_KEYWORD)


def _definition(
    name: str, key: str, environment: Mapping[str, str]
) -> tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None]:
    """The file of `path.py:name`, and its last statement that defines the name; None: none does."""
    path, attribute, body = _statements(name, key, environment)
    found = None
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and one.name == attribute:
            found = one
    return path, found


def _statements(name: str, key: str, environment: Mapping[str, str]) -> tuple[Path, str, list[ast.stmt]]:
    """The file of `path.py:name`, the name, and what is written in the file."""
    file, _, attribute = _split(name, key)
    path, content = read_trusted(file, key, environment)
    return path, attribute, ast.parse(content).body


def load_object(name: str, key: str, environment: Mapping[str, str] = os.environ) -> Any:
    """Run the file of `path.py:name`, and return the object of that name.

    Raises:
        ConfigError: as `check_object`, or running the file fails.
    """
    file, _, attribute = _split(name, key)
    path, content = read_trusted(file, key, environment)
    try:
        module = _module(path, content)
    except (Exception, SystemExit) as error:  # boundary to user code, which may raise anything
        raise ConfigError(f"{key}={name!r} can't be loaded: {located_error(error)}.") from error
    if not hasattr(module, attribute):
        raise _lacks(name, key, path, {one for one in vars(module) if not one.startswith("_")})
    return getattr(module, attribute)


def _split(name: str, key: str) -> tuple[str, str, str]:
    file, colon, attribute = name.rpartition(":")
    if not file.endswith(SUFFIX) or not attribute.isidentifier():
        raise ConfigError(f"{key}={name!r} must be path.py:name; {file} is not a Python file.")
    return file, colon, attribute


def _module(path: Path, content: bytes) -> ModuleType:
    """The module of a file, which runs once for each content.

    It is in `sys.modules`, where dataclasses look up their annotations.
    """
    name = f"file_{path.stem}_{digest(bytes(path) + content)[:16]}"
    if name not in sys.modules:
        loader = _ReadFile(path, content)
        spec = ModuleSpec(name, loader, origin=str(path))
        spec.has_location = True
        sys.modules[name] = module_from_spec(spec)
        try:
            loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _given(path: Path, argument: str) -> tuple[str, str]:
    try:
        return str(path.resolve()), digest(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{argument} {path}: the file can't be read: {error.strerror or error}.") from error


def _lacks(name: str, key: str, path: Path, names: Iterable[str]) -> ConfigError:
    attribute, known = name.rpartition(":")[2], sorted(names)
    return ConfigError(
        f"{key}={name!r}: {path} defines no {attribute!r}; it defines {', '.join(known) or 'nothing'}.{nearest(attribute, known)}"
    )


def _imports(body: Iterable[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each import that always runs, so not of those within try or
    if.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.partition(".")[0]


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
