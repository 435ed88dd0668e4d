"""CheckpointEngineRegistry: find engine and manager classes by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint
from inspect import isclass
from types import ModuleType
from typing import TypeVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.contract import ENGINE_API_VERSION, Capabilities, CheckpointEngine
from rl_ckpt_engine.plugins import PluginPolicy, entry_points, load_plugin, load_policy, plugin_names
from rl_ckpt_engine.sync.manager import CheckpointEngineManager
from rl_protocol.errors import ConfigError, user_code
from rl_protocol.support.plugins import owner

ENTRY_POINT_GROUP = "rl_ckpt_engine.backends"
_ENGINES = "rl_ckpt_engine.engines"
_BUILT_IN = {
    "naive": (f"{_ENGINES}.one_host.naive", "NaiveEngine", ""),
    "shm": (f"{_ENGINES}.one_host.shm", "ShmEngine", ""),
    "shm-copy": (f"{_ENGINES}.one_host.shm_copy", "ShmCopyEngine", ""),
    "tcp": (f"{_ENGINES}.network.tcp", "TcpEngine", ""),
    "disk": (f"{_ENGINES}.storage.disk", "DiskEngine", ""),
    "gloo": (f"{_ENGINES}.network.torch_group", "GlooEngine", "torch"),
    "nccl": (f"{_ENGINES}.network.torch_group", "NcclEngine", "torch"),
    "ray": (f"{_ENGINES}.storage.ray_objects", "RayEngine", "ray"),
    "nixl": (f"{_ENGINES}.network.nixl", "NixlEngine", "nixl"),
    "mooncake": (f"{_ENGINES}.network.mooncake", "MooncakeEngine", "mooncake"),
    "cuda_ipc": (f"{_ENGINES}.one_host.cuda_ipc", "CudaIpcEngine", "cuda"),
}
"""Name -> module, class, required extra of this package. Imported on first use."""
_DELTA = "delta-"


_REGISTERED: dict[str, type[CheckpointEngine]] = {}
"""Name -> class, by `CheckpointEngineRegistry.register`, in this process."""
E = TypeVar("E", bound=type[CheckpointEngine])


class CheckpointEngineRegistry:
    """Finds engine classes by name.

    >>> CheckpointEngineRegistry().get("shm").__name__
    'ShmEngine'

    Args:
        policy: which plug-ins may load; defaults to the file named by RL_PLUGINS.
    """

    def __init__(self, policy: PluginPolicy | None = None) -> None:
        self._policy = policy
        self._loaded: dict[str, type[CheckpointEngine]] = {}

    @staticmethod
    def register(name: str) -> Callable[[E], E]:
        """Class decorator that registers the engine under `name` in every registry of this process.

            @CheckpointEngineRegistry.register("mine")
            class MyEngine(CheckpointEngine): ...

        A class without `name` in its body gets this name.

        Raises:
            ConfigError: another class has the name, or the class is not an engine of this API
                version. Raised when the class is decorated.
        """

        def add(engine: E) -> E:
            _name(engine, name)
            checked = checked_engine(name, engine, f"{engine!r}")
            taken = _taken_by(name, checked)
            if taken:
                raise ConfigError(f"The engine name {name!r} is taken by {taken}; choose another.")
            _REGISTERED[name] = checked
            return engine

        return add

    def get(self, name: str) -> type[CheckpointEngine]:
        """The class of that name.

        Raises:
            ConfigError: there are no or several engines of that name, or the engine is not allowed,
                can't be imported, or does not implement this API version.
        """
        if name in self._loaded:
            return self._loaded[name]
        registered = _REGISTERED.get(name)
        points = _others(name, registered)
        own = registered is not None or name in _BUILT_IN
        if len(points) + own > 1:
            owners = [owner(point) for point in points] + (["rl-ckpt-engine or register()"] if own else [])
            raise ConfigError(f"Several packages offer an engine {name!r}: {', '.join(owners)}. Uninstall all but one.")
        if registered is not None:
            return registered
        if name.startswith(_DELTA) and not points:
            self._loaded[name] = _delta(self.get(name.removeprefix(_DELTA)))
        elif name in _BUILT_IN:
            self._loaded[name] = _built_in(name)
        elif points:
            offered = load_plugin("backends", name, self._allowed())
            self._loaded[name] = checked_engine(name, offered, owner(points[0]))
        else:
            raise ConfigError(
                f"There is no checkpoint engine {name!r}; there are {', '.join(self.names())}, each also with the prefix delta-. Other "
                f"packages can offer engines as entry points in group {ENTRY_POINT_GROUP}."
            )
        return self._loaded[name]

    def resolve(self, config: CheckpointEngineConfig) -> type[CheckpointEngine]:
        """The class of `config.backend`, from the plug-in `config.custom_backend_module` if that is
        set.

        The plug-in is a class, or a module that registers engines (`register`) when it is imported.

        Raises:
            ConfigError: see `get`; or the plug-in offers or registers an engine of another name.
        """
        custom = config.custom_backend_module
        if not custom:
            return self.get(config.backend)
        if config.backend in _BUILT_IN:
            raise ConfigError(
                f"CheckpointEngineConfig.custom_backend_module={custom} can't replace the engine {config.backend!r} of this package; set "
                "CheckpointEngineConfig.backend to the name of the plug-in's engine."
            )
        if config.backend not in self._loaded:
            offered = load_plugin("backends", custom, self._allowed())
            if isinstance(offered, ModuleType):
                _check_registers(custom, config.backend)
                return self.get(config.backend)
            self._loaded[config.backend] = checked_engine(config.backend, offered, custom)
        return self._loaded[config.backend]

    def create(self, name: str, config: CheckpointEngineConfig | None = None) -> CheckpointEngine:
        """Create an engine of that name.

        Raises:
            ConfigError: see `get` and `create_engine`.
        """
        return create_engine(self.get(name), CheckpointEngineConfig() if config is None else config)

    def manager(self, config: CheckpointEngineConfig) -> type[CheckpointEngineManager]:
        """The manager's class: CheckpointEngineManager, or the plug-in
        `config.checkpoint_manager_class`.

        Raises:
            ConfigError: the plug-in is not allowed, can't be imported, or is not a manager of this
                API version.
        """
        name = config.checkpoint_manager_class
        if not name:
            return CheckpointEngineManager
        offered = load_plugin("managers", name, self._allowed())
        if not isclass(offered) or not issubclass(offered, CheckpointEngineManager):
            raise ConfigError(
                f"The manager {name!r} is {offered!r}, which is not a subclass of CheckpointEngineManager."
            )
        _check_version("manager", name, name, offered)
        return offered

    def names(self) -> tuple[str, ...]:
        """Every name that `get` knows, allowed or not; imports no plug-in."""
        return tuple(sorted({*_BUILT_IN, *_REGISTERED, *plugin_names("backends")}))

    def _allowed(self) -> PluginPolicy:
        if self._policy is None:
            self._policy = load_policy()
        return self._policy


def create_engine(engine: type[CheckpointEngine], config: CheckpointEngineConfig) -> CheckpointEngine:
    """Create an engine of that class.

    Raises:
        ConfigError: see CheckpointEngine.create; or the class raised another exception.
    """
    with user_code(
        lambda raised: ConfigError(
            f"The engine {engine.name!r} can't be created: {raised}. Repair it, or set CheckpointEngineConfig.backend to another."
        ),
        "rl_ckpt_engine",
    ):
        return engine.create(config)


def _name(offered: object, name: str) -> None:
    if isclass(offered) and issubclass(offered, CheckpointEngine) and "name" not in vars(offered):
        offered.name = name


def _taken_by(name: str, engine: type[CheckpointEngine]) -> str:
    """The other owner of the name; empty if there is none."""
    before = _REGISTERED.get(name)
    if before is not None and before is not engine:
        return f"{before.__module__}.{before.__qualname__}"
    if name in _BUILT_IN:
        return "this package"
    return ", ".join(owner(point) for point in _others(name, engine))


def _others(name: str, engine: type[CheckpointEngine] | None) -> list[EntryPoint]:
    """Entry points of that name, except those of the engine's module, which may both register and
    offer it."""
    return [point for point in entry_points("backends", name) if engine is None or point.module != engine.__module__]


def _check_registers(module: str, name: str) -> None:
    base = name.removeprefix(_DELTA)
    if base not in _REGISTERED:
        found = ", ".join(sorted(_REGISTERED)) or "none"
        raise ConfigError(
            f"CheckpointEngineConfig.custom_backend_module={module} is a module that registers no engine {name!r}; registered "
            f"are {found}. Decorate the class with @CheckpointEngineRegistry.register({base!r}), or change CheckpointEngineConfig.backend."
        )


def _delta(engine: type[CheckpointEngine]) -> type[CheckpointEngine]:
    try:
        module = import_module(f"{_ENGINES}.delta.delta_engine")
    except ImportError as error:
        raise ConfigError(f"Delta engines can't be loaded: {error}. Install rl-ckpt-engine[delta].") from error
    return module.delta_over(engine)


def _built_in(name: str) -> type[CheckpointEngine]:
    module, attribute, extra = _BUILT_IN[name]
    try:
        offered: object = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"The engine {name!r} can't be loaded: {error}. Install rl-ckpt-engine[{extra}].") from error
    return checked_engine(name, offered, "rl-ckpt-engine")


def checked_engine(name: str, offered: object, owner: str) -> type[CheckpointEngine]:
    """Check that an object is an engine class of that name and return it.

    Raises:
        ConfigError: it is not; says what it is.
    """
    if not isclass(offered) or not issubclass(offered, CheckpointEngine):
        raise ConfigError(f"The engine {name!r} ({owner}) is {offered!r}, which is not a subclass of CheckpointEngine.")
    _check_version("engine", name, owner, offered)
    if offered.name != name:
        raise ConfigError(f"The engine {name!r} ({owner}) has the name {offered.name!r}; both names must be equal.")
    if not isinstance(getattr(offered, "capabilities", None), Capabilities):
        raise ConfigError(f"The engine {name!r} ({owner}) must say what it can do: capabilities = Capabilities(..).")
    if missing := sorted(getattr(offered, "__abstractmethods__", ())):
        raise ConfigError(f"The engine {name!r} ({owner}) lacks the methods {', '.join(missing)}.")
    return offered


def _check_version(kind: str, name: str, owner: str, offered: type) -> None:
    written_for: object = getattr(offered, "API_VERSION", None)
    if written_for != ENGINE_API_VERSION:
        raise ConfigError(
            f"The {kind} {name!r} ({owner}) was written for API version {written_for}; this is version {ENGINE_API_VERSION}. "
            "Install matching releases."
        )
