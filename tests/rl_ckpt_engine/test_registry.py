"""CheckpointEngineRegistry: names, engine classes and settings."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import ClassVar

import pytest

import rl_ckpt_engine
from rl_ckpt_engine import Capabilities, CheckpointEngine, CheckpointEngineConfig, CheckpointEngineRegistry, plugins
from rl_ckpt_engine.engines.contract import check_capabilities
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.plugins import PluginPolicy
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.support.plugins import Allowed


class PluginEngine(NaiveEngine):
    name: ClassVar[str] = "plugin"


class FutureEngine(NaiveEngine):
    API_VERSION: ClassVar[int] = 2
    name: ClassVar[str] = "future"


class SilentEngine(CheckpointEngine):
    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "silent"


class HalfEngine(SilentEngine):
    name: ClassVar[str] = "half"
    capabilities: ClassVar[Capabilities] = NaiveEngine.capabilities

    def close(self) -> None: ...


class Points:
    """A fake of `installed_plugins` that records what was loaded."""

    def __init__(self, **offers: object) -> None:
        self.offers = offers
        self.twice: set[str] = set()
        self.loaded: list[str] = []

    def __call__(self, group: str) -> metadata.EntryPoints:
        assert group == "rl_ckpt_engine.backends"
        return metadata.EntryPoints(
            self._point(name) for name in self.offers for _ in range(2 if name in self.twice else 1)
        )

    def _point(self, name: str) -> metadata.EntryPoint:
        owner = self

        class Point(metadata.EntryPoint):
            def load(self) -> object:
                owner.loaded.append(name)
                offer = owner.offers[name]
                if isinstance(offer, Exception):
                    raise offer
                return offer

        point = Point(name=name, value=f"pkg_{name}:Engine", group="rl_ckpt_engine.backends")
        vars(point).update(dist=SimpleNamespace(name=f"pkg-{name}", version="1.2"))
        return point


EVERYTHING = PluginPolicy(
    allowed={
        "rl_ckpt_engine": {
            "backends": {
                name: Allowed(distribution=f"pkg_{name}", version="1.2")
                for name in ("plugin", "future", "wrong", "silent", "half", "broken", "alias")
            }
        }
    }
)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Points:
    fake = Points(
        plugin=PluginEngine,
        future=FutureEngine,
        wrong=dict,
        silent=SilentEngine,
        half=HalfEngine,
        broken=ImportError("No module named 'cupy'"),
        alias=PluginEngine,
    )
    monkeypatch.setattr(plugins, "installed_plugins", fake)
    return fake


@pytest.mark.parametrize(
    "name", ["naive", "shm", "shm-copy", "tcp", "disk", "gloo", "nccl", "nixl", "mooncake", "cuda_ipc"]
)
@pytest.mark.parametrize("prefix", ["", "delta-"])
def test_an_engine_has_what_it_declares_and_at_most_two_base_classes(prefix: str, name: str) -> None:
    engine = CheckpointEngineRegistry().get(prefix + name)
    check_capabilities(engine)
    bases = [base for base in engine.__mro__[1:] if issubclass(base, CheckpointEngine) and base is not CheckpointEngine]
    assert len(bases) <= 2, f"{engine.__name__} is a {' is a '.join(base.__name__ for base in bases)}"
    assert not any(base.__dict__.get("name") for base in bases), "no engine is another engine"


def test_a_declared_capability_without_its_methods_is_refused() -> None:
    class Direct(TcpEngine):
        capabilities: ClassVar[Capabilities] = replace(TcpEngine.capabilities, direct=True)

    with pytest.raises(ConfigError, match="Engine 'tcp' declares direct but has no method 'room'"):
        check_capabilities(Direct)
    engine = TcpEngine()
    for call in (lambda: engine.room([]), engine.leave):
        with pytest.raises(WeightSyncError, match="Engine 'tcp' "):
            call()
    engine.close()


def test_built_ins() -> None:
    registry = CheckpointEngineRegistry()
    assert registry.get("shm") is ShmEngine
    assert isinstance(registry.create("naive"), NaiveEngine)
    assert {"naive", "shm"} <= set(registry.names())


def test_a_plug_in_is_loaded_when_its_name_is_asked_for_and_no_other(points: Points) -> None:
    registry = CheckpointEngineRegistry(EVERYTHING)
    assert "plugin" in registry.names()
    registry.get("shm")
    assert points.loaded == []
    assert registry.get("plugin") is PluginEngine
    assert registry.get("plugin") is PluginEngine
    assert points.loaded == ["plugin"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "missing",
            "no checkpoint engine 'missing'; there are alias, broken, cuda_ipc, disk, future, gloo, half, mooncake, naive, nccl, nixl, "
            "plugin, ray, shm, shm-copy, silent, tcp, wrong",
        ),
        ("future", "API version 2; this is version 1"),
        ("wrong", "not a subclass of CheckpointEngine"),
        ("silent", r"must say what it can do: capabilities = Capabilities\(\.\.\)"),
        ("half", r"'half' \(pkg_half:Engine of pkg-half 1\.2\) lacks the methods abort, build_topology, .*prepare"),
        ("broken", "No module named 'cupy'"),
        ("alias", "has the name 'plugin'"),
    ],
)
def test_what_can_not_be_used_is_said(points: Points, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointEngineRegistry(EVERYTHING).get(name)


def test_two_owners_of_a_name_are_refused(points: Points) -> None:
    points.twice.add("plugin")
    with pytest.raises(ConfigError, match="Several packages offer an engine 'plugin'"):
        CheckpointEngineRegistry(EVERYTHING).get("plugin")
    points.offers["shm"] = PluginEngine
    with pytest.raises(ConfigError, match="Several packages offer an engine 'shm'"):
        CheckpointEngineRegistry(EVERYTHING).get("shm")
    assert points.loaded == []


def test_a_decorated_class_is_known_everywhere(points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", {})
    registry = CheckpointEngineRegistry(EVERYTHING)

    @CheckpointEngineRegistry.register("mine")
    class Mine(NaiveEngine):
        """The decorator sets its name."""

    assert Mine.name == "mine"
    assert registry.get("mine") is CheckpointEngineRegistry(EVERYTHING).get("mine") is Mine
    assert "mine" in registry.names()
    assert NaiveEngine.name == "naive"
    # a second registration of the same class
    assert CheckpointEngineRegistry.register("mine")(Mine) is Mine
    assert points.loaded == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", r"'taken' is taken by .*Other; choose another"),
        ("shm", "'shm' is taken by this package"),
        ("plugin", r"'plugin' is taken by pkg_plugin:Engine of pkg-plugin 1\.2"),
    ],
)
def test_a_name_is_registered_once(points: Points, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", {})

    @CheckpointEngineRegistry.register("taken")
    class Other(NaiveEngine):
        """Registered first."""

    class Mine(NaiveEngine):
        """Registered second."""

    with pytest.raises(ConfigError, match=message):
        CheckpointEngineRegistry.register(name)(Mine)
    assert CheckpointEngineRegistry(EVERYTHING).get("taken") is Other


def test_a_package_may_decorate_the_class_that_it_offers(points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ckpt_engine.registry._REGISTERED", {})
    monkeypatch.setattr(PluginEngine, "__module__", "pkg_plugin")
    CheckpointEngineRegistry.register("plugin")(PluginEngine)
    assert CheckpointEngineRegistry(EVERYTHING).get("plugin") is PluginEngine


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (FutureEngine, "API version 2"),
        (PluginEngine, "has the name 'plugin'"),
        (dict, "not a subclass of CheckpointEngine"),
    ],
)
def test_what_is_no_engine_of_that_name_is_not_registered(engine: type, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointEngineRegistry.register("other")(engine)
    assert "other" not in CheckpointEngineRegistry(EVERYTHING).names()


@pytest.mark.parametrize("backend", ["", "my.module:Engine", "../engine.py", "a b"])
def test_backend_must_be_a_short_name(backend: str) -> None:
    with pytest.raises(ConfigError, match="short name"):
        CheckpointEngineConfig(backend=backend)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_deadline_must_be_finite_and_positive(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        CheckpointEngineConfig(timeout_s=timeout_s)


def test_everything_exported_is_listed() -> None:
    public = {n for n in vars(rl_ckpt_engine) if not n.startswith("_")}
    modules = {n for n in public if type(vars(rl_ckpt_engine)[n]).__name__ == "module"}
    assert public - modules == set(rl_ckpt_engine.__all__)
    assert rl_ckpt_engine.__version__ == metadata.version("rl-ckpt-engine")


def test_importing_pulls_in_nothing_heavy_and_loads_no_plug_in() -> None:
    code = (
        "from importlib import metadata\n"
        "def no(**_): raise AssertionError('entry points were read at import')\n"
        "metadata.entry_points = no\n"
        "import sys, rl_ckpt_engine, rl_ckpt_engine.testing\n"
        "bad = {'torch', 'ray', 'vllm', 'transformers', 'tensordict', 'pytest'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


class BrokenEngine(NaiveEngine):
    """A user's engine, whose `create` is that of the base class."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "broken"

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        raise OSError("no such device")


@pytest.mark.parametrize("name", ["broken", "delta-broken"])
def test_an_engine_that_can_t_be_created_is_named_with_the_line(monkeypatch, name) -> None:
    monkeypatch.setitem(rl_ckpt_engine.registry._REGISTERED, "broken", BrokenEngine)
    line = inspect.getsourcelines(BrokenEngine.__init__)[1] + 2
    text = rf"The engine '{name}' can't be created: OSError: no such device \({__file__}:{line}\)\. .*\.backend"
    with pytest.raises(ConfigError, match=text):
        CheckpointEngineRegistry().create(name)
