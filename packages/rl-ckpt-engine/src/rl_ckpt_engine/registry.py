"""From a short name to an engine class: built-ins, and what installed packages offer under `rl_ckpt_engine.backends`.

The same call runs on the driver and in every worker. A package is imported only when its name is asked for. Module paths and files are
never accepted: what may run is decided by what is installed, not by the settings of a run.
"""

from __future__ import annotations

from importlib import metadata
from inspect import isclass

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engine import ENGINE_API_VERSION, CheckpointEngine
from rl_ckpt_engine.engines.disk import DiskEngine
from rl_ckpt_engine.engines.naive import NaiveEngine
from rl_ckpt_engine.engines.shm import ShmEngine
from rl_ckpt_engine.engines.tcp import TcpEngine
from rl_protocol.errors import ConfigError

ENTRY_POINT_GROUP = "rl_ckpt_engine.backends"


class CheckpointEngineRegistry:
    """Names and the engine classes behind them.

    >>> CheckpointEngineRegistry().get("shm").__name__
    'ShmEngine'
    """

    def __init__(self) -> None:
        self._classes: dict[str, type[CheckpointEngine]] = {
            engine.name: engine for engine in (NaiveEngine, ShmEngine, TcpEngine, DiskEngine)
        }
        self._loaded: dict[str, type[CheckpointEngine]] = {}

    def register(self, name: str, engine: type[CheckpointEngine]) -> None:
        """Add a class under a name, for code that assembles its own run.

        Raises:
            ConfigError: the name is taken, or the class is no engine of this API version.
        """
        taken = self._classes.get(name)
        if taken is not None or _entry_points(name):
            owner = f"by {taken.__module__}.{taken.__qualname__}" if taken is not None else "by an installed package"
            raise ConfigError(f"The engine name {name!r} is taken {owner}; choose another.")
        self._classes[name] = _checked(name, engine, f"{engine!r}")

    def get(self, name: str) -> type[CheckpointEngine]:
        """The class of that name.

        Raises:
            ConfigError: nobody offers the name, several do, the package that does can't be imported, or what it offers is no engine of
                this API version.
        """
        if name in self._loaded:
            return self._loaded[name]
        points = _entry_points(name)
        known = self._classes.get(name)
        if len(points) + (known is not None) > 1:
            owners = [_distribution(point) for point in points] + (["rl-ckpt-engine or register()"] if known else [])
            raise ConfigError(f"Several offer an engine {name!r}: {', '.join(owners)}. Uninstall all but one.")
        if known is not None:
            return known
        if not points:
            raise ConfigError(
                f"There is no checkpoint engine {name!r}; there are {', '.join(self.names())}. Others come with packages that offer an entry "
                f"point of that name in group {ENTRY_POINT_GROUP}."
            )
        self._loaded[name] = _load(name, points[0])
        return self._loaded[name]

    def create(self, name: str, config: CheckpointEngineConfig | None = None) -> CheckpointEngine:
        """A new engine of that name, with the settings given or the defaults.

        Raises:
            ConfigError: see `get` and CheckpointEngine.create.
        """
        return self.get(name).create(CheckpointEngineConfig() if config is None else config)

    def names(self) -> tuple[str, ...]:
        """Every name that `get` knows; nothing is imported to find out."""
        return tuple(
            sorted({*self._classes, *(point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP))})
        )


def _entry_points(name: str) -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=ENTRY_POINT_GROUP, name=name))


def _distribution(point: metadata.EntryPoint) -> str:
    return f"{point.value} of {point.dist.name if point.dist is not None else 'an unknown distribution'}"


def _load(name: str, point: metadata.EntryPoint) -> type[CheckpointEngine]:
    owner = _distribution(point)
    try:
        offered: object = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The engine {name!r} ({owner}) can't be loaded: {error}. Install what it needs.") from error
    return _checked(name, offered, owner)


def _checked(name: str, offered: object, owner: str) -> type[CheckpointEngine]:
    if not isclass(offered) or not issubclass(offered, CheckpointEngine):
        raise ConfigError(f"The engine {name!r} ({owner}) is {offered!r}, which is no subclass of CheckpointEngine.")
    written_for: object = getattr(offered, "API_VERSION", None)
    if written_for != ENGINE_API_VERSION:
        raise ConfigError(
            f"The engine {name!r} ({owner}) was written for API version {written_for}; this is version {ENGINE_API_VERSION}. "
            "Install matching releases."
        )
    if offered.name != name:
        raise ConfigError(f"The engine {name!r} ({owner}) calls itself {offered.name!r}; both names must be the same.")
    return offered
