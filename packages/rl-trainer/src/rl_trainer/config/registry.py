"""Objects by name: built-in ones, entry points of installed packages, and files of code.

The operator allows packages (`rl_protocol.support.plugins`), the user allows files
(`rl_protocol.support.trusted_files`). Loading one imports nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Generic, TypeVar

from rl_protocol import ConfigError
from rl_protocol.support.options import nearest
from rl_protocol.support.plugins import installed_plugins, load_installed
from rl_protocol.support.trusted_files import FILES, load_object, names_file

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects by name. An entry point whose name is taken is an error.

    Args:
        key: the parameter that holds the name, such as `RolloutConfig.session`, for messages.
        group: entry point group of installed packages.
        kind: type that an entry point must be an instance of.
        built_in: the built-in objects.
        elsewhere: names in other projects -> ours, for suggestions.
    """

    def __init__(
        self, key: str, group: str, kind: type[T], built_in: Mapping[str, T], elsewhere: Mapping[str, str]
    ) -> None:
        self._key = key
        self._group = group
        self._kind = kind
        self._built_in = dict(built_in)
        self._elsewhere = dict(elsewhere)
        self._loaded: dict[EntryPoint, T] = {}
        self._files: dict[tuple[str, str], T] = {}
        """(`path.py:name` in full, what the user allowed) -> object; a changed file has another
        key."""

    def names(self) -> list[str]:
        """All names, built-in ones first."""
        offered = {entry.name for entry in installed_plugins(self._group)}
        return [*self._built_in, *sorted(offered - self._built_in.keys())]

    def get(self, name: str) -> T:
        """The object of that name, or of `path.py:name`.

        Raises:
            ConfigError: the name is unknown (names the nearest) or ambiguous, or the package or
                file is not allowed or can't be used.
        """
        if names_file(name):
            return self._load_file(name)
        offered = [entry for entry in installed_plugins(self._group) if entry.name == name]
        if len(offered) + (name in self._built_in) > 1:
            where = ", ".join(entry.value for entry in offered)
            raise ConfigError(
                f"{self._key}={name!r} is the name of several: {'a built-in, ' if name in self._built_in else ''}{where}. "
                f"Uninstall all but one, or rename the entry point in {self._group!r}."
            )
        if name in self._built_in:
            return self._built_in[name]
        if not offered:
            raise ConfigError(self._unknown(name))
        return self._load(offered[0])

    def _unknown(self, name: str) -> str:
        if name.endswith(".py"):
            return f"{self._key}={name!r} names a file; name the object in it too, as in {name}:NAME."
        known = self.names()
        if known:
            hint = nearest(self._elsewhere.get(name, name), known)
            return f"{self._key} must be one of {', '.join(known)}; got {name!r}.{hint}"
        return (
            f"{self._key} must be empty, because no installed package registers a {self._kind.__name__}; got {name!r}. To register one, "
            f"install a package whose pyproject.toml has {name} = 'module:object' under [project.entry-points.{self._group!r}]."
        )

    def _load(self, entry: EntryPoint) -> T:
        if entry in self._loaded:
            return self._loaded[entry]
        try:
            offered = load_installed(entry)
        except ConfigError as error:
            raise ConfigError(f"{self._key}={entry.name!r}: {error}") from error
        self._loaded[entry] = self._checked(entry.name, entry.value, offered)
        return self._loaded[entry]

    def _load_file(self, name: str) -> T:
        allowed = (str(Path(name).expanduser().absolute()), os.environ.get(FILES, ""))
        if allowed not in self._files:
            self._files[allowed] = self._checked(name, name, load_object(name, self._key))
        return self._files[allowed]

    def _checked(self, name: str, value: str, offered: object) -> T:
        if not isinstance(offered, self._kind):
            raise ConfigError(
                f"{self._key}={name!r}: {value} must be of type {self._kind.__name__}; got {type(offered).__name__}."
                f"{self._remedy(offered)}"
            )
        return offered

    def _remedy(self, offered: object) -> str:
        """How to make an object of the kind from what a name leads to."""
        kind, given = self._kind.__name__, getattr(offered, "__name__", "")
        if isinstance(offered, type) and issubclass(offered, self._kind):
            return f" Name an object of the class: NAME = {given}()."
        if given.isidentifier() and callable(offered) and is_dataclass(self._kind):
            return f" Name an object that has it: NAME = {kind}({given})."
        return ""
