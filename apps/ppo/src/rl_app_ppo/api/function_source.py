"""The source of a module that defines a function of this process in another process.

A function of an importable module is imported there. The source of a function of a script or a
notebook is copied, with the globals that it uses: imports, functions, constants and compiled
regular expressions.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import pprint
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rl_protocol import ConfigError

_FUTURE = "from __future__ import annotations"


def module_source(function: FunctionType) -> str:
    """Source of a module that has `function` under its name.

    Raises:
        ConfigError: the function is a lambda, is defined within another function, or uses something
            that can't be had in another process; says what, and what to do.
    """
    name = function.__name__
    if "<" in function.__qualname__ or "." in function.__qualname__:
        what = "a lambda" if name == "<lambda>" else "defined within a function or a class"
        raise _refused(function, f"it is {what}")
    module = _Module()
    try:
        module.add(name, function, function.__globals__)
    except _UnavailableError as error:
        raise _refused(function, str(error)) from error
    return module.text()


def _refused(function: FunctionType, why: str) -> ConfigError:
    return ConfigError(
        f"reward {function.__qualname__!r} can't run in the reward processes: {why}. Define it with `def` at the top level of a module "
        "that can be imported, or of a script or notebook with imports, functions and constants alone."
    )


class _UnavailableError(Exception):
    """A value can't be had in another process; the message says why."""


class _Module:
    """The text of a module, built from values of this process."""

    def __init__(self) -> None:
        self._folders: list[str] = []
        self._pieces: dict[str, str] = {}
        """Global name -> the lines that define it, in an order in which they can run."""
        self._open: set[str] = set()
        """Names whose own globals are being added."""

    def text(self) -> str:
        """The source."""
        lines = [_FUTURE]
        if self._folders:
            lines += ["import sys", f"sys.path += [one for one in {self._folders!r} if one not in sys.path]"]
        return "\n\n".join(["\n".join(lines), *self._pieces.values()]) + "\n"

    def add(self, name: str, value: object, around: Mapping[str, Any]) -> None:
        """Define a name as `value`, which is a global of the namespace `around`.

        Raises:
            _UnavailableError: it can't be defined.
        """
        if name in self._pieces or name in self._open:
            return
        if isinstance(value, ModuleType):
            self._pieces[name] = self._import(value) + f" as {name}"
        elif (place := _importable(value)) is not None:
            module, attribute = place
            self._use_folder(module)
            self._pieces[name] = f"from {module.__name__} import {attribute} as {name}"
        elif inspect.isfunction(value) and value.__globals__ is around:
            self._add_function(name, value, around)
        elif isinstance(value, re.Pattern):
            pattern: re.Pattern[Any] = value
            self._pieces[name] = f'{name} = __import__("re").compile({pattern.pattern!r}, {pattern.flags})'
        elif _is_constant(value):
            self._pieces[name] = f"{name} = {pprint.pformat(value, sort_dicts=False)}"
        else:
            raise _UnavailableError(f"it uses {name}, a {type(value).__name__} of this process")

    def _import(self, module: ModuleType) -> str:
        if not _found_by_name(module):
            raise _UnavailableError(f"it uses the module {module.__name__}, which other processes can't import")
        self._use_folder(module)
        return f"import {module.__name__}"

    def _add_function(self, name: str, function: FunctionType, around: Mapping[str, Any]) -> None:
        source, own = _source(function), function.__name__
        if not own.isidentifier():
            raise _UnavailableError(f"it uses the lambda {name}")
        if own != name:
            self.add(own, function, around)
            self._pieces[name] = f"{name} = {own}"
            return
        self._open.add(name)
        for used in sorted(_globals_of(source) - {name}):
            if used in around:
                self.add(used, around[used], around)
            elif not hasattr(builtins, used):
                raise _UnavailableError(f"it uses {used}, which is not defined")
        self._open.remove(name)
        self._pieces[name] = source

    def _use_folder(self, module: ModuleType) -> None:
        """Have the folder of the module's package in sys.path, unless it is installed."""
        spec = sys.modules[module.__name__.partition(".")[0]].__spec__
        if spec is None or not (spec.has_location or spec.submodule_search_locations):  # built in
            return
        inside = spec.submodule_search_locations
        folder = Path(next(iter(inside))).parent if inside else Path(str(spec.origin)).parent
        paths = sysconfig.get_paths()
        installed = [Path(paths[kind]) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
        if not any(folder.is_relative_to(place) for place in installed) and str(folder) not in self._folders:
            self._folders.append(str(folder))


def _importable(value: object) -> tuple[ModuleType, str] | None:
    """The module of a value and its name there, if another process can import it."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", getattr(value, "__name__", None))
    if module is None or not isinstance(name, str) or not name.isidentifier():
        return None
    return (module, name) if getattr(module, name, None) is value and _found_by_name(module) else None


def _found_by_name(module: ModuleType) -> bool:
    """Whether importing the name of the module in a new process gives the same file.

    Nothing is imported.
    """
    if module.__name__ == "__main__" or sys.modules.get(module.__name__) is not module:
        return False
    path: Any = None
    spec: ModuleSpec | None = None
    parts = module.__name__.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin in (getattr(module, "__file__", None), "built-in", "frozen")


def _is_constant(value: object) -> bool:
    """Whether the value can be written as a literal."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _source(function: FunctionType) -> str:
    """The text of a function, checked against what runs.

    Raises:
        _UnavailableError: there is none, or it is not that of the function.
    """
    if function.__closure__:
        raise _UnavailableError(f"{function.__name__} is made by another function")
    try:
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
        whole = "".join(inspect.findsource(function)[0])
        # code depends on the imports around it; a notebook compiles each statement alone
        codes = [code for text in (source, f"{_FUTURE}\n{source}", whole) for code in _functions_of(text)]
    except (OSError, TypeError, SyntaxError) as error:
        raise _UnavailableError(f"the source of {function.__name__} can't be read") from error
    if not any(_same(code, function.__code__) for code in codes):
        raise _UnavailableError(f"the source of {function.__name__} has changed since it was defined")
    return source


def _functions_of(text: str) -> list[CodeType]:
    """Code of the functions at the top level of a module."""
    code = compile(text, "<reward>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _same(a: CodeType, b: CodeType) -> bool:
    """Whether two code objects do the same; lines and files may differ."""
    if (a.co_name, a.co_code, a.co_names, a.co_varnames) != (b.co_name, b.co_code, b.co_names, b.co_varnames):
        return False
    if len(a.co_consts) != len(b.co_consts):
        return False
    pairs = zip(a.co_consts, b.co_consts, strict=True)
    return all(
        _same(one, other)
        if isinstance(one, CodeType) and isinstance(other, CodeType)
        else type(one) is type(other) and one == other
        for one, other in pairs
    )


def _globals_of(source: str) -> set[str]:
    """Global names that a function definition uses, those of annotations left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
    return set(_global_names(symtable.symtable(ast.unparse(tree), "<reward>", "exec")))


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
    for child in table.get_children():
        yield from _global_names(child)
