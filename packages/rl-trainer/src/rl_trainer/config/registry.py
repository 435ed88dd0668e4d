"""Objects by name: built-in ones, and entry points of installed packages that the operator allows.

Loading one imports nothing else; see `rl_protocol.support.plugins`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from rl_protocol import ConfigError
from rl_protocol.support.options import nearest
from rl_protocol.support.plugins import load_installed

T = TypeVar("T")


@functools.cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Entry points of installed packages in that group; cached for the process."""
    return tuple(entry_points(group=group))


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

    def names(self) -> list[str]:
        """All names, built-in ones first."""
        offered = {entry.name for entry in installed(self._group)}
        return [*self._built_in, *sorted(offered - self._built_in.keys())]

    def get(self, name: str) -> T:
        """The object of that name.

        Raises:
            ConfigError: the name is unknown (names the nearest) or ambiguous, or the package is not
                allowed or can't be used.
        """
        offered = [entry for entry in installed(self._group) if entry.name == name]
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
        if not isinstance(offered, self._kind):
            raise ConfigError(
                f"{self._key}={entry.name!r}: {entry.value} must be a {self._kind.__name__}; got {type(offered).__name__}."
            )
        self._loaded[entry] = offered
        return offered
