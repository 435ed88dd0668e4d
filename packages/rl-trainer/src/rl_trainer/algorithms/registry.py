"""Algorithms by name: built-ins, and those that installed packages offer as entry points and the operator allows (`rl_protocol.plugins`).

Loading one imports nothing else.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from rl_protocol import ConfigError
from rl_protocol.plugins import load_installed

T = TypeVar("T")


@functools.cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """What installed packages offer in that group; looked up once, as it does not change while a process runs."""
    return tuple(entry_points(group=group))


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence that names the most similar known name; empty where none is similar."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    close = close or sorted((other for other in names if name.startswith(other)), key=len)[-1:]
    return f" Did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """Name -> algorithm. A name means one thing: an entry point that takes a built-in's name, or another's, is an error.

    Args:
        key: the configuration key that holds the name, for messages.
        group: entry point group in which packages offer more.
        kind: what an entry point must be an instance of.
        built_in: the ones of this package.
        elsewhere: what others call them -> name, for suggestions.
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
        """Every name there is, built-ins first."""
        offered = {entry.name for entry in installed(self._group)}
        return [*self._built_in, *sorted(offered - self._built_in.keys())]

    def get(self, name: str) -> T:
        """The algorithm of that name.

        Raises:
            ConfigError: there is none (with the nearest name), two are called so, or the package's may not load or can't be used.
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
            hint = nearest(self._elsewhere.get(name, name), self.names())
            raise ConfigError(f"{self._key} must be one of {', '.join(self.names())}; got {name!r}.{hint}")
        return self._load(offered[0])

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
